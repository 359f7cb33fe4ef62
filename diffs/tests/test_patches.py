"""The pages of recipes and pitfalls are patches that write what the pages say."""

import re
import shutil
import subprocess
import sys

import patches
import pytest
from generating import generate
from support.scripts import NEEDS_PATCH, ROOT, edit

PATCHES = [patch for kind in patches.KINDS for patch in patches.collect(ROOT, kind)]
RECIPES = [patch for patch in PATCHES if patch.kind == "recipes"]


@NEEDS_PATCH
def test_the_command_beside_a_patch_writes_the_patched_script(copy):
    for patch in PATCHES:
        *_, command, start = patch.command.split(" &&\n")
        said = subprocess.run(command.split(), cwd=copy, check=True, capture_output=True, text=True)
        assert not re.search("fuzz|offset", said.stdout), patch.path
        assert (copy / patch.new).read_text(encoding="utf-8") == patch.result
        assert patch.new == f"{patch.name}{patch.diff.old.suffix}"
        assert patch.new in start.split()


@pytest.mark.skipif(not shutil.which("busybox"), reason="needs: apt-get install busybox")
def test_the_patch_of_busybox_writes_the_same(copy):
    """BusyBox has no option -o, so it patches a copy."""
    for patch in PATCHES:
        shutil.copy(copy / patch.old, copy / patch.new)
        words = ["busybox", "patch", patch.new, patch.path]
        subprocess.run(words, cwd=copy, check=True, capture_output=True)
        assert (copy / patch.new).read_text(encoding="utf-8") == patch.result, patch.path


def test_a_recipe_is_as_tidy_as_a_step(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for patch in RECIPES:
        (tmp_path / patch.new).write_text(patch.result, encoding="utf-8")
    for words in (["check"], ["format", "--check"]):
        start = [sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path]
        result = subprocess.run(start, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_a_patch_follows_the_lines_of_its_script(copy):
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    assert generate(copy).returncode == 0
    for patch in PATCHES:
        moved = patches.read(copy, copy / patch.path)
        assert "# The command line:" in moved.result or not patch.old.startswith("0")
        assert moved.text == (copy / patch.path).read_text(encoding="utf-8")
    assert generate(copy, "--check").returncode == 0


@pytest.mark.slow
def test_each_page_says_what_to_type_with_one_gpu(copy):
    path = copy / "recipes" / "ema.md"
    text = path.read_text(encoding="utf-8")
    edit(path, f"{patches.ONE_GPU.format('torchrun')}\n\n", "")
    assert generate(copy, "--check").stdout == "stale: recipes/ema.md\n"
    assert generate(copy).returncode == 0
    assert path.read_text(encoding="utf-8") == text
    for patch in PATCHES:
        assert bool(patch.one_gpu) == (not patch.old.endswith(".sbatch")), patch.path


def test_each_pitfall_says_that_its_command_writes_a_broken_script():
    for patch in PATCHES:
        said = f"\n```\n\n{patches.BROKEN}\n\n" in patch.text
        assert said == (patch.kind == "pitfalls"), patch.path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".sampler.set_epoch(", ".set_epoch(", "no longer applies to 05_gather_eval.py: @@ -"),
        ("Read more: ", "", "not in the form of the others"),
        (
            "| What you see | Why | What to do |\n|---|---|---|\n",
            "",
            "not in the form of the others",
        ),
        ("| No error.", "No error.", "not in the form of the others"),
        ("`test_pitfall[no_set_epoch]`", "test", "names no tests"),
        ("--- 05_gather_eval.py", "--- 06.py", "there is no 06.py to patch"),
        ("     def _run_epoch", "+\n" * 13 + "     def _run_epoch", "14 lines, 12 are allowed"),
        ("patch -o no_set_epoch.py", "patch", "its command does not end with 'patch -o no_set"),
    ],
)
def test_errors_in_a_patch_are_reported_in_one_line(copy, old, new, said):
    edit(copy / "pitfalls" / "no_set_epoch.md", old, new)
    result = generate(copy)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("generate.py: pitfalls/no_set_epoch.md: ")
    assert said in line


def test_a_page_without_a_place_in_the_index_is_reported(copy):
    shutil.copy(copy / "recipes" / "ema.md", copy / "recipes" / "new.md")
    result = generate(copy)
    said = "generate.py: recipes/new.md: in no group of diffs/generator/patches.py\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", said)
