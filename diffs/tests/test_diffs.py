"""The generated files match the scripts and the notes, and the walk-through is correct."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
from generating import generate
from support.scripts import NEEDS_PATCH, ROOT, SCRIPTS, edit

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
ANCHORS = {  # how each page's viewers turn a heading into an anchor: GitHub, Jupyter
    "README.md": lambda title: re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"),
    "walkthrough.ipynb": lambda title: title.replace(" ", "-"),
}


def markdown(name):
    """Return the text of a page of the walk-through, without the notebook's code."""
    text = (ROOT / "diffs" / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


# ---------------------------------------------------------------- nothing generated is stale


def test_nothing_is_stale():
    result = generate(ROOT, "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_without_its_packages_it_says_what_to_install():
    start = [sys.executable, "-S", ROOT / "diffs" / "generate.py", "--check"]  # no site-packages
    result = subprocess.run(start, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    said = r"generate.py: No module named '\w+': pip install -r requirements-dev.txt\n"
    assert re.fullmatch(said, result.stderr)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_word_changed_by_hand_is_stale(copy):
    for name in ("README.md", "index.html", "walkthrough.ipynb"):
        edit(copy / "diffs" / name, "copies rank 0's weights", "forgets rank 0's weights")
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "stale: diffs/README.md",
        "stale: diffs/index.html",
        "stale: diffs/walkthrough.ipynb",
    ]


@pytest.mark.slow
def test_the_notes_outlive_unrelated_edits(copy):
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    assert generate(copy).returncode == 0


def without_a_note(text):
    return re.sub(r"### Print on rank 0 only\n.*?(?=### )", "", text, flags=re.DOTALL)


def without_a_lesson(text):
    return re.sub(r"\*\*In \w+ lines\*\*\n\n", "", text, count=1)


def with_a_wrong_count(text):
    return re.sub(r"\*\*In \w+ lines\*\*", "**In nine lines**", text, count=1)


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
            "two notes share",
        ),
        (
            lambda text: text.replace("`self.model = DDP(", "`self.model = FSDP("),
            "`self.model = FSDP(model)` is in no hunk of 01 → 02",
        ),
        (lambda text: text.replace("`self.model = DDP(model)`", "`if dist.`"), "`if dist.` is in"),
        (without_a_lesson, "01 → 02 does not begin with **In five lines**"),
        (with_a_wrong_count, '01 → 02 says "In nine lines" and lists'),
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


@pytest.mark.skipif(not shutil.which("git"), reason="needs git: apt-get install git")
@pytest.mark.parametrize(("old", "new"), STEPS, ids=lambda path: path.name[:2])
def test_git_apply_does_too(copy, old, new):
    """git looks for the new name, so the old step is copied there."""
    shutil.copy(old, copy / new.name)
    diff = copy / "diffs" / f"{old.name[:2]}_to_{new.name[:2]}.diff"
    subprocess.run(["git", "apply", "-p0", diff], cwd=copy, check=True, capture_output=True)
    assert (copy / new.name).read_bytes() == new.read_bytes()


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


@pytest.mark.parametrize("name", ANCHORS)
def test_the_names_of_tests_are_folded_away(name):
    text = markdown(name)
    hunks = text.count("```diff\n")
    text, folds = re.subn(r"<details>\n<summary>Tests.*?\n</details>", "", text, flags=re.DOTALL)
    assert folds == hunks
    assert "`test_" not in text


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
    text = re.sub(r"\*\*In \w+ lines\*\*", "", text[text.index("\n## ") :])
    assert re.findall(r"\*\*(.+?)\*\*", text.replace("\n", " ")) == TERMS
    text = re.sub(r"```.*?```|`[^`]+`|!?\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    for term in TERMS:
        before, _, _ = " ".join(text.split()).partition(f"**{term}**")
        assert not re.search(rf"\b{term}", before), term
