"""The generated files match the scripts, and every hunk is explained and needed."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import hunks
import nbformat
import patches
import pytest
from nbclient import NotebookClient
from support.generator import generate
from support.scripts import ROOT, SCRIPTS, edit

STEPS = list(pairwise(SCRIPTS))
TERMS = [  # in the order in which the notes define them
    "rank",
    "world size",
    "process group",
    "backend",
    "all-reduce",
    "local rank",
    "rendezvous",
]
NEEDS_PATCH = pytest.mark.skipif(
    not shutil.which("patch"), reason="needs the program: apt-get install patch"
)
HUNKS = [
    pytest.param(diff, hunk, id=f"{diff.slug}-{hunk.note.slug}")
    for diff in hunks.explained(ROOT)
    for hunk in diff.hunks
]


# ---------------------------------------------------------------- generated, and not stale


def test_nothing_is_stale():
    result = generate(ROOT, "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_without_its_packages_it_says_what_to_install():
    start = [sys.executable, "-S", ROOT / "diffs" / "generate.py", "--check"]  # no site-packages
    result = subprocess.run(start, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    said = r"generate.py: No module named '\w+': pip install -r requirements-dev.txt\n"
    assert re.fullmatch(said, result.stderr)


def test_what_is_stale_is_named_and_rewritten(copy):
    script, diff = copy / SCRIPTS[1].name, copy / "diffs" / "01_to_02.diff"
    edit(script, "as process number", "as member number")
    diff.unlink()
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "stale: diffs/01_to_02.diff",
        "stale: diffs/02_to_03.diff",
        "stale: diffs/README.md",
        "stale: diffs/index.html",
        "stale: diffs/walkthrough.ipynb",
    ]
    assert not diff.exists()
    assert generate(copy).returncode == 0
    for name in ("01_to_02.diff", "README.md", "index.html", "walkthrough.ipynb"):
        assert "as member number" in (copy / "diffs" / name).read_text(encoding="utf-8"), name
    assert generate(copy, "--check").returncode == 0


def test_a_word_changed_by_hand_is_stale(copy):
    for name in ("README.md", "index.html", "walkthrough.ipynb"):
        edit(copy / "diffs" / name, "rearranges the buckets", "keeps the buckets")
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "stale: diffs/README.md",
        "stale: diffs/index.html",
        "stale: diffs/walkthrough.ipynb",
    ]


def test_the_notes_outlive_unrelated_edits(copy):
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    assert generate(copy).returncode == 0


def without_a_note(text):
    return re.sub(r"### Print on rank 0 only\n.*?(?=### )", "", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_note, "of 01 → 02: -    print(message"),
        (lambda text: text.replace("+import signal", "+import gone"), 'the line of "What the new'),
        (lambda text: text.replace("+import signal", "+"), "hunks of 03 → 04"),
        (lambda text: text.replace("## 04 → 05:", "## 04 → 06:"), 'there is no diff "04 → 06"'),
        (lambda text: text.replace("`test_help[03]`", "-"), "A launcher instead"),
        (lambda text: text.replace("Read more: [device", "[device"), "One process per GPU"),
        (
            lambda text: text.replace("### Wrap the model", "### One process per GPU"),
            "two notes of",
        ),
    ],
)
def test_errors_in_the_notes_are_reported_in_one_line(copy, change, said):
    path = copy / "diffs" / "notes.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(change(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    result = generate(copy)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("generate.py: notes.md: ")
    assert said in line


@NEEDS_PATCH
@pytest.mark.parametrize(("old", "new"), STEPS, ids=lambda path: path.name[:2])
def test_patch_turns_each_step_into_the_next(copy, old, new):
    diff = copy / "diffs" / f"{old.name[:2]}_to_{new.name[:2]}.diff"
    with diff.open("rb") as file:
        subprocess.run(["patch", old.name], cwd=copy, stdin=file, check=True, capture_output=True)
    assert (copy / old.name).read_bytes() == new.read_bytes()


@pytest.mark.skipif(not shutil.which("git"), reason="needs the program: apt-get install git")
@pytest.mark.parametrize(("old", "new"), STEPS, ids=lambda path: path.name[:2])
def test_git_apply_does_too(copy, old, new):
    """It looks for the new name, so the old step is copied to it."""
    shutil.copy(old, copy / new.name)
    diff = copy / "diffs" / f"{old.name[:2]}_to_{new.name[:2]}.diff"
    subprocess.run(["git", "apply", "-p0", diff], cwd=copy, check=True, capture_output=True)
    assert (copy / new.name).read_bytes() == new.read_bytes()


# ---------------------------------------------------------------- recipes and pitfalls

PATCHES = [patch for kind in patches.KINDS for patch in patches.patches(ROOT, kind)]
RECIPES = [patch for patch in PATCHES if patch.kind == "recipes"]


@NEEDS_PATCH
def test_the_command_beside_a_patch_writes_the_patched_script(copy):
    for patch in PATCHES:
        *_, command, start = patch.command.split(" &&\n")
        said = subprocess.run(command.split(), cwd=copy, check=True, capture_output=True, text=True)
        assert not re.search("fuzz|offset", said.stdout), patch.path
        assert (copy / patch.new).read_text(encoding="utf-8") == patch.result
        assert start.split()[-1] == patch.new == f"{patch.name}{patch.diff.old.suffix}"


def test_a_recipe_is_as_tidy_as_a_step(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for patch in RECIPES:
        (tmp_path / patch.new).write_text(patch.result, encoding="utf-8")
    for words in (["check"], ["format", "--check"]):
        start = [sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path]
        result = subprocess.run(start, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


def test_a_patch_follows_the_lines_of_its_script(copy):
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    assert generate(copy).returncode == 0
    for patch in PATCHES:
        moved = patches.read(copy, copy / "diffs" / patch.path)
        assert "# The command line:" in moved.result or not patch.old.startswith("0")
        assert moved.text == (copy / "diffs" / patch.path).read_text(encoding="utf-8")
    assert generate(copy, "--check").returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".sampler.set_epoch(", ".set_epoch(", "no longer applies to 05_gather_eval.py: @@ -"),
        ("Read more: ", "", "not in the form of the others"),
        ("Remedy: ", "", "has no symptom"),
        ("`test_pitfall[no_set_epoch]`", "test", "names no tests"),
        ("--- 05_gather_eval.py", "--- 06.py", "there is no 06.py to patch"),
        ("     def _run_epoch", "+\n" * 13 + "     def _run_epoch", "14 lines, 12 are allowed"),
    ],
)
def test_errors_in_a_patch_are_reported_in_one_line(copy, old, new, said):
    edit(copy / "diffs" / "pitfalls" / "no_set_epoch.diff", old, new)
    result = generate(copy)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("generate.py: pitfalls/no_set_epoch.diff: ")
    assert said in line


# ---------------------------------------------------------------- the walk-through


def test_its_links_lead_somewhere():
    text = (ROOT / "diffs" / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", text):
        assert (ROOT / "diffs" / target).exists(), target


def test_its_commands_show_the_diff():
    text = (ROOT / "diffs" / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for command in commands.splitlines():
        program, *words = command.split()
        assert {"02_multigpu_spawn.py", "03_multigpu_torchrun.py"} <= set(words)
        if program in ("diff", "git") and shutil.which(program):  # the others are editors
            result = subprocess.run([program, *words], cwd=ROOT, capture_output=True, check=False)
            assert (result.returncode, result.stderr) == (1, b"")
            assert b"TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in result.stdout


# ---------------------------------------------------------------- the notes


def test_each_term_is_defined_once_where_it_is_first_used():
    text = (ROOT / "diffs" / "notes.md").read_text(encoding="utf-8")
    text = text[text.index("\n## ") :]
    assert re.findall(r"\*\*(.+?)\*\*", text.replace("\n", " ")) == TERMS
    text = re.sub(r"```.*?```|`[^`]+`|!?\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    for term in TERMS:
        before, _, _ = " ".join(text.split()).partition(f"**{term}**")
        assert not re.search(rf"\b{term}", before), term


def location(test, diff):
    """Return the id of a test: in the file of the diff's new step or, if not there, elsewhere."""
    name = test.partition("[")[0]
    files = [
        path.name
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if f"def {name}(" in path.read_text(encoding="utf-8")
    ]
    first = (f"test_{diff.new.name[:2]}_", "test_ladder", "test_recipes", "test_pitfalls")
    ours = [file for file in files if file.startswith(first)]
    assert len(ours or files) == 1, f"{name} is in {files}"
    return f"tests/{(ours or files)[0]}::{test}"


def test_the_tests_that_the_notes_name_exist():
    wanted = [
        location(test, diff)
        for diff in hunks.explained(ROOT)
        for hunk in diff.hunks
        for test in hunk.note.tests
    ]
    wanted += [location(test, patch.diff) for patch in PATCHES for test in patch.tests]
    start = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*start, *wanted], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.everything
@NEEDS_PATCH
@pytest.mark.parametrize(("diff", "hunk"), HUNKS)
def test_without_the_hunk_the_tests_that_it_names_fail(copy, diff, hunk):
    one = f"--- {diff.old.name}\n+++ {diff.new.name}\n{hunk.text}\n"
    start = ["patch", "-R", diff.new.name]
    subprocess.run(start, cwd=copy, input=one, text=True, check=True, capture_output=True)
    tests = [location(test, diff) for test in hunk.note.tests]
    start = [sys.executable, "-m", "pytest", "-q", "--everything", "-p", "no:cacheprovider"]
    result = subprocess.run([*start, *tests], cwd=copy, capture_output=True, text=True, check=False)
    summary = result.stdout.splitlines()[-1]
    assert re.match(rf"{len(tests)} failed in ", summary), result.stdout + result.stderr


# ---------------------------------------------------------------- the notebook


@pytest.fixture
def book():
    return nbformat.read(ROOT / "diffs" / "walkthrough.ipynb", 4)


def check_outputs(book):
    """Every script has learned something, without an error."""
    printed = {
        cell.id: "".join(o.text for o in cell.outputs if o.get("name") == "stdout")
        for cell in book.cells
        if cell.cell_type == "code"
    }
    assert printed.pop("setup") == ""
    assert {o.output_type for cell in book.cells for o in cell.get("outputs", [])} == {"stream"}
    assert len(printed) == 6
    for name, text in printed.items():
        line = r"^epoch \d  loss \d\.\d{4}  [\d,]+ samples/s$"
        assert re.search(line, text, re.MULTILINE), (name, text)
        percent = float(re.search(r"^accuracy (\d+\.\d\d)% \(\d+/359\)$", text, re.MULTILINE)[1])
        assert percent > 95, (name, text)
        assert "Error" not in text, text
    resumed = "resuming from 03.pt after epoch 2\nepoch 3 "
    assert printed["run-03-again"].startswith(resumed)
    assert "macro avg" in printed["run-05"]


def test_the_notebook_is_valid_and_has_outputs(book):
    nbformat.validate(book)
    check_outputs(book)
    text = json.dumps(book)
    assert str(ROOT) not in text
    assert "/tmp/" not in text
    for path in SCRIPTS:
        assert path.name in text
    assert text.count("```diff") == sum(len(diff.hunks) for diff in hunks.explained(ROOT))


def test_outputs_of_unchanged_cells_are_kept(copy):
    path = copy / "diffs" / "walkthrough.ipynb"
    before = nbformat.read(path, 4)
    for cell in before.cells:
        cell.source += "\n# as it was before" if cell.id == "run-02" else ""
    nbformat.write(before, path)
    assert generate(copy).returncode == 0
    outputs = {c.id: c.outputs for c in nbformat.read(path, 4).cells if c.cell_type == "code"}
    assert outputs["run-02"] == []
    assert outputs["run-03"] == next(cell for cell in before.cells if cell.id == "run-03").outputs


@pytest.mark.everything
def test_the_notebook_runs_from_top_to_bottom(copy, book):
    resources = {"metadata": {"path": str(copy / "diffs")}}
    NotebookClient(book, timeout=300, resources=resources).execute()
    check_outputs(book)
    assert not list(copy.rglob("*.pt"))
