"""Nothing generated is stale, the diffs are patches, and every hunk is needed."""

import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import hunks
import nbformat
import patches
import pytest
from patching import NEEDS_PATCH
from support import server
from support.scripts import ROOT, SCRIPTS, edit

pytestmark = NEEDS_PATCH


def run(*command, cwd="/"):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def generate(root, *words):
    """Run a copy's generator, from a different working directory."""
    return run(sys.executable, root / "diffs" / "generate.py", *words)


# ---------------------------------------------------------------- nothing generated is stale


def test_nothing_is_stale():
    result = generate(ROOT, "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
def test_what_is_stale_is_named_and_rewritten_and_the_rest_is_kept(copy):
    """Patches follow their lines; cells of the notebook that did not change keep their outputs."""
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    before = runs(copy)
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert "stale: diffs/01_to_02.diff\n" in result.stdout
    result = generate(copy)
    assert result.returncode == 0
    assert {"diffs/01_to_02.diff", "diffs/walkthrough.ipynb"} < {*result.stdout.split()}
    assert runs(copy) == before
    assert generate(copy, "--check").returncode == 0


def runs(root):
    cells = nbformat.read(root / "diffs" / "walkthrough.ipynb", 4).cells
    return [cell for cell in cells if cell.id.startswith("run-")]


NOTES = "diffs/README.md"
PATCH = "more/pitfalls/no_set_epoch.md"
BY_HAND = "more/recipes/after_backward.md"


@pytest.mark.parametrize(
    ("page", "old", "new", "message"),
    [
        (NOTES, "rank 0 only\n\n```diff\n", "rank 0 only\n\n```\n", "no note on the hunk"),
        (NOTES, "`class ResumableSampler(", "`class Gone(", "is in 0 hunks of 03 → 04"),
        (PATCH, ".sampler.set_epoch(", ".set_epoch(", "no longer applies: "),
        (BY_HAND, "<details>\n<summary>Tests</summary>", "Tests", "has no tests"),
        (PATCH, "patch -o no_set_epoch.py", "patch", "its command does not end with 'patch -o no_"),
    ],
)
def test_an_error_in_a_page_is_reported_in_one_line(copy, page, old, new, message):
    edit(copy / page, old, new)
    with pytest.raises(hunks.Problem) as problem:
        hunks.updated_readme(copy, hunks.annotated_diffs(copy))
        for kind in patches.KINDS:
            patches.collect(copy, kind)
    place = page.removeprefix("diffs/")
    assert re.match(rf"{place}: .*{re.escape(message)}.*$", str(problem.value))


# ---------------------------------------------------------------- the diffs are patches


def test_patch_and_git_apply_turn_each_step_into_the_next(tmp_path):
    """git looks for the new name, so the old step is copied there."""
    for old, new in pairwise(SCRIPTS):
        diff = ROOT / "diffs" / f"{old.name[:2]}_to_{new.name[:2]}.diff"
        commands = {old.name: ["patch", old.name, diff], new.name: ["git", "apply", "-p0", diff]}
        for name, command in commands.items():
            shutil.copy(old, tmp_path / name)
            assert run(*command, cwd=tmp_path).returncode == 0
            assert (tmp_path / name).read_bytes() == new.read_bytes(), command


def test_a_recipe_is_as_tidy_as_a_step(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for patch in patches.collect(ROOT, "more/recipes"):
        (tmp_path / Path(patch.new).name).write_text(patch.result, encoding="utf-8")
    for words in (["check"], ["format", "--check"]):
        result = run(sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path)
        assert result.returncode == 0, result.stdout


# ---------------------------------------------------------------- every hunk is needed

QUICK = (  # hunks whose tests start no launcher, for each time; the others once a week
    "02-to-03-a-launcher-instead-of-spawn",
    "03-to-04-a-sampler-that-can-start-inside-an-epoch",
    "04-to-05-the-last-of-the-five",
)
REST = pytest.mark.weekly("reverts each of the other hunks and trains without it, for minutes")
HUNKS = {
    f"{diff.slug}-{hunk.slug}": (diff, hunk)
    for diff in hunks.annotated_diffs(ROOT)
    for hunk in diff.hunks
}


def test_every_hunk_names_a_test():
    assert not [name for name, (_, hunk) in HUNKS.items() if not hunk.note.tests]


def location(test, diff):
    """Return the id of a test: of the new step's file if it is there, else of another."""
    name = test.partition("[")[0]
    paths = sorted([*ROOT.glob("tests/test_*.py"), *ROOT.glob("slurm/tests/test_*.py")])
    found = [path for path in paths if f"def {name}(" in path.read_text(encoding="utf-8")]
    (path,) = [path for path in found if f"test_{diff.new.name[:2]}_" in path.name] or found
    return f"{path.relative_to(ROOT)}::{test}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=REST) for name in HUNKS]
)
def test_without_the_hunk_the_tests_that_its_note_names_fail(copy, name):
    diff, hunk = HUNKS[name]
    old, new = ([line[1:] for line in hunk.lines if line[0] != sign] for sign in "+-")
    edit(copy / diff.new.name, "\n".join([*new, ""]), "\n".join([*old, ""]))
    words = ["pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    tests = [location(test, diff) for test in hunk.note.tests]
    result = run(*map(str, server.command("-m", *words, *tests)), cwd=copy)
    summary = result.stdout.splitlines()[-1]
    assert re.fullmatch(rf"=+ {len(tests)} failed in .*=+", summary), result.stdout + result.stderr
