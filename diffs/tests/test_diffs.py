"""Nothing generated is stale, an error in a page is reported, and every hunk is needed."""

import re
import shutil
import sys
from pathlib import Path

import hunks
import nbformat
import patches
import pytest
from patching import NEEDS_PATCH
from support import server
from support.jobs import finished, run
from support.scripts import ROOT, edit

PYTEST = Path(pytest.__file__).with_name("__main__.py")
pytestmark = NEEDS_PATCH


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository."""
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")
    return shutil.copytree(ROOT, tmp_path / "copy", ignore=ignore)


def generate(cwd, root, *words):
    """Run a copy's generator in a different working directory."""
    return run([sys.executable, root / "diffs" / "generate.py", *words], cwd)


# ---------------------------------------------------------------- nothing generated is stale


def test_nothing_is_stale(tmp_path):
    job = generate(tmp_path, ROOT, "--check")
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


@pytest.mark.slow
def test_what_is_stale_is_named_and_rewritten_and_the_rest_is_kept(copy, tmp_path):
    """Patches follow their lines; cells of the notebook that did not change keep their outputs."""
    for path in copy.glob("0[1-9]_*.py"):
        edit(path, "\n\ndef parse_args(", "\n\n# The command line:\n\n\ndef parse_args(")
    before = runs(copy)
    every = ["--check"], [], ["--check"]
    stale, written, fresh = (generate(tmp_path, copy, *words) for words in every)
    assert [job.returncode for job in (stale, written, fresh)] == [1, 0, 0]
    assert "stale: diffs/01_to_02.diff\n" in stale.stdout
    assert {"diffs/01_to_02.diff", "diffs/walkthrough.ipynb"} < {*written.stdout.split()}
    assert runs(copy) == before


def runs(root):
    cells = nbformat.read(root / "diffs" / "walkthrough.ipynb", 4).cells
    return [cell for cell in cells if cell.id.startswith("run-")]


@pytest.mark.parametrize(
    ("page", "old", "new", "message"),
    [
        ("diffs/README.md", "rank 0 only\n\n```diff\n", "rank 0 only\n\n```\n", "no note on the"),
        ("more/pitfalls/no_set_epoch.md", ".sampler.set_epoch(", ".set_epoch(", "no longer"),
        ("more/recipes/after_backward.md", "<details>", "", "has no tests"),
    ],
)
def test_an_error_in_a_page_is_reported_in_one_line(copy, tmp_path, page, old, new, message):
    edit(copy / page, old, new)
    job = generate(tmp_path, copy)
    assert job.returncode == 1
    (line,) = job.stderr.splitlines()
    assert line.startswith(f"generate.py: {page.removeprefix('diffs/')}: {message}")


def test_a_recipe_is_as_tidy_as_a_step(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for patch in patches.collect(ROOT, "more/recipes"):
        (tmp_path / Path(patch.new).name).write_text(patch.result, encoding="utf-8")
    for words in (["check"], ["format", "--check"]):
        finished([sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path], tmp_path)


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


def location(test, diff):
    """Return the id of a test: of the new step's file if it is there, else of another."""
    name = test.partition("[")[0]
    paths = sorted([*ROOT.glob("tests/test_*.py"), *ROOT.glob("slurm/tests/test_*.py")])
    found = [path for path in paths if f"def {name}(" in path.read_text(encoding="utf-8")]
    (path,) = [path for path in found if f"test_{diff.new.name[:2]}_" in path.name] or found
    return f"{path.relative_to(ROOT)}::{test}"


def test_every_hunk_names_tests_that_exist(tmp_path):
    tests = [[location(test, diff) for test in hunk.note.tests] for diff, hunk in HUNKS.values()]
    assert all(tests)
    paths = {ROOT / test for named in tests for test in named}
    finished([sys.executable, "-m", "pytest", "--collect-only", "-m", "", *paths], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=REST) for name in HUNKS]
)
def test_without_the_hunk_the_tests_that_its_note_names_fail(copy, name):
    diff, hunk = HUNKS[name]
    old, new = ([line[1:] for line in hunk.lines if line[0] != sign] for sign in "+-")
    edit(copy / diff.new.name, "\n".join([*new, ""]), "\n".join([*old, ""]))
    words = [PYTEST, "-q", "-m", "", "-p", "no:cacheprovider"]
    tests = [location(test, diff) for test in hunk.note.tests]
    job = run(server.command(*words, *tests), copy, timeout=900)
    assert re.search(rf"=+ {len(tests)} failed in .*=+$", job.stdout), job
