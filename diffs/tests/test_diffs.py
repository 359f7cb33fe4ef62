"""The generated files match their sources, the diffs are patches, the walk leads to its hunks."""

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
from generating import generate
from patching import NEEDS_PATCH
from support.scripts import ROOT, SCRIPTS, edit

STEPS = list(pairwise(SCRIPTS))
DIFFS = ROOT / "diffs"
ANCHORS = {  # how each page's viewers turn a heading into an anchor: GitHub, Jupyter
    "README.md": hunks.anchor,
    "walkthrough.ipynb": lambda title: title.replace(" ", "-"),
}


def markdown(name):
    """Return the text of a page of the walk-through, without the notebook's code."""
    if name.endswith(".md"):
        return (DIFFS / name).read_text(encoding="utf-8")
    cells = nbformat.read(DIFFS / name, 4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


# ---------------------------------------------------------------- nothing generated is stale


def test_nothing_is_stale():
    result = generate(ROOT, "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
def test_what_is_stale_is_named_and_rewritten_and_the_rest_is_kept(copy):
    """Notes and patches follow their lines; cells that did not change keep their outputs."""
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    edit(copy / "diffs" / "README.md", "copies rank 0's weights", "forgets rank 0's weights")
    (copy / "diffs" / "01_to_02.diff").unlink()
    before = nbformat.read(copy / "diffs" / "walkthrough.ipynb", 4)
    result = generate(copy, "--check")
    assert result.returncode == 1
    stale = result.stdout.replace("stale: ", "").split()
    for name in ("01_to_02.diff", "README.md", "index.html", "walkthrough.ipynb"):
        assert f"diffs/{name}" in stale
    assert not (copy / "diffs" / "01_to_02.diff").exists()
    assert generate(copy).returncode == 0
    assert generate(copy, "--check").returncode == 0
    assert "copies rank 0's weights" in (copy / "diffs" / "README.md").read_text("utf-8")
    moved = [copy / name for name in stale if name.startswith(("recipes/", "pitfalls/"))]
    assert moved
    for page in moved:
        assert "# The command line:" in patches.read(copy, page).result, page
    after = nbformat.read(copy / "diffs" / "walkthrough.ipynb", 4)
    runs = [[c for c in book.cells if c.id.startswith("run-")] for book in (before, after)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(?s)### Print on rank 0 only\n.*?(?=### )", "", "of 01 → 02: -    print(message"),
        (r"\+import signal", "+import gone", 'the line of "What the new'),
        (r"`self\.model = DDP\(", "`self.model = FSDP(", "is in no hunk of 01 → 02"),
        ("Read more: ", "", "no 'Read more:' behind its why"),
    ],
)
def test_errors_in_the_notes_are_reported_in_one_line(tmp_path, old, new, said):
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    (tmp_path / "diffs").mkdir()
    text = (DIFFS / "notes.md").read_text(encoding="utf-8")
    (tmp_path / "diffs" / "notes.md").write_text(re.sub(old, new, text), encoding="utf-8")
    with pytest.raises(hunks.Problem, match=f"notes.md: .*{re.escape(said)}") as problem:
        hunks.explained(tmp_path)
    assert "\n" not in str(problem.value)


# ---------------------------------------------------------------- the diffs are patches


@NEEDS_PATCH
def test_patch_and_git_apply_turn_each_step_into_the_next(tmp_path):
    """git looks for the new name, so the old step is copied there."""
    for old, new in STEPS:
        diff = DIFFS / f"{old.name[:2]}_to_{new.name[:2]}.diff"
        for name, start in {
            old.name: ["patch", old.name, diff],
            new.name: ["git", "apply", "-p0", diff],
        }.items():
            if shutil.which(start[0]):
                shutil.copy(old, tmp_path / name)
                subprocess.run(start, cwd=tmp_path, check=True, capture_output=True)
                assert (tmp_path / name).read_bytes() == new.read_bytes(), start


@NEEDS_PATCH
def test_each_page_of_a_recipe_or_pitfall_is_a_patch(tmp_path):
    """Its command writes the script that the page on the web shows; so does BusyBox's patch."""
    for patch in [patch for kind in patches.KINDS for patch in patches.collect(ROOT, kind)]:
        *_, command, start = patch.command.split(" &&\n")
        *words, new, old, page = command.replace("\\\n", "").split()
        assert (new, old, page) == (patch.new, patch.old, patch.path)
        assert new in start.split()
        commands = [[*words, tmp_path / new, ROOT / old, ROOT / page]]
        if shutil.which("busybox"):  # which has no option -o
            shutil.copy(ROOT / old, tmp_path / "copy")
            commands.append(["busybox", "patch", "copy", ROOT / page])
        for each in commands:
            said = subprocess.run(each, cwd=tmp_path, check=True, capture_output=True, text=True)
            assert not re.search("fuzz|offset", said.stdout), patch.path
            written = tmp_path / ("copy" if "busybox" in each else new)
            assert written.read_text(encoding="utf-8") == patch.result, (patch.path, each[0])


def test_a_recipe_is_as_tidy_as_a_step(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for patch in patches.collect(ROOT, "recipes"):
        (tmp_path / Path(patch.new).name).write_text(patch.result, encoding="utf-8")
    for words in (["check"], ["format", "--check"]):
        start = [sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path]
        result = subprocess.run(start, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".sampler.set_epoch(", ".set_epoch(", "no longer applies to 05_gather_eval.py: @@ -"),
        ("Read more: ", "", "Read more:' behind its tests"),
        ("`test_pitfall[no_set_epoch]`", "test", "has no tests"),
        ("patch -o no_set_epoch.py", "patch", "its command does not end with 'patch -o no_set"),
    ],
)
def test_errors_in_a_patch_are_reported_in_one_line(tmp_path, old, new, said):
    (tmp_path / "pitfalls").mkdir()
    page = tmp_path / "pitfalls" / "no_set_epoch.md"
    for path in (SCRIPTS[-1], ROOT / "pitfalls" / page.name):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    edit(page, old, new)
    with pytest.raises(hunks.Problem, match=r"^pitfalls/no_set_epoch\.md: ") as problem:
        patches.read(tmp_path, page)
    assert said in str(problem.value)
    assert "\n" not in str(problem.value)


# ---------------------------------------------------------------- the walk-through


@pytest.mark.parametrize("name", ANCHORS)
def test_each_step_opens_with_lines_that_lead_to_their_hunks(name):
    _, *steps = re.split(r"^## 0\d → ", markdown(name), flags=re.MULTILINE)
    assert len(steps) == len(STEPS)
    for step in steps:
        sections = re.findall(r"^### (.+)\n\n```diff\n((?s:.*?))^```", step, re.MULTILINE)
        diffs = {ANCHORS[name](title): diff for title, diff in sections}
        lesson = re.findall(r"^\d\. \[`(.+)`\]\(#(.+?)\): .", step, re.MULTILINE)
        assert 3 <= len(lesson) <= 6
        for code, anchor in lesson:
            assert re.search(rf"^\+ *{re.escape(code)}", diffs[anchor], re.MULTILINE), code
        shown = re.sub(r"<details>\n<summary>Tests.*?\n</details>", "", step, flags=re.DOTALL)
        assert "`test_" not in shown.partition("## The tests")[0]  # folded away


def test_its_commands_show_the_diff():
    (commands,) = re.findall(r"```bash\n(.*?)```", markdown("README.md"), re.DOTALL)
    for command in commands.splitlines():
        program, *words = command.split()
        assert {"02_multigpu_spawn.py", "03_multigpu_torchrun.py"} <= {*words}
        if program in ("diff", "git") and shutil.which(program):  # the others are editors
            result = subprocess.run([program, *words], cwd=ROOT, capture_output=True, check=False)
            assert (result.returncode, result.stderr) == (1, b"")
            assert b"LOCAL_RANK" in result.stdout


def test_each_term_is_defined_once_where_it_is_first_used():
    text = (DIFFS / "notes.md").read_text(encoding="utf-8")
    text = re.sub(r"\*\*In \w+ lines\*\*", "", text[text.index("\n## ") :])
    bold = re.findall(r"\*\*(.+?)\*\*", text.replace("\n", " "))
    terms = [term for term in bold if "→" not in term]
    assert {"rank", "world size", "all-reduce"} < {*terms}
    text = re.sub(r"```.*?```|`[^`]+`|!?\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    for term in terms:
        before, _, _ = " ".join(text.split()).partition(f"**{term}**")
        assert not re.search(rf"\b{term}", before), term
