"""Every hunk is needed: without it, the tests that its note names fail."""

import re
import subprocess

import hunks
import pytest
from patching import NEEDS_PATCH
from support import server
from support.scripts import ROOT

QUICK = (  # hunks whose tests start no launcher, for each time; the others once a week
    "02-to-03-a-launcher-instead-of-spawn",
    "03-to-04-a-sampler-that-can-start-inside-an-epoch",
    "04-to-05-the-last-of-the-five",
)
REST = pytest.mark.weekly("reverts each of 27 hunks and trains without it, for minutes")
HUNKS = [
    pytest.param(diff, hunk, id=name, marks=() if name in QUICK else REST)
    for diff in hunks.explained(ROOT)
    for hunk in diff.hunks
    if hunk.note.tests
    for name in [f"{diff.slug}-{hunk.slug}"]
]


def location(test, diff):
    """Return the id of a test: of the new step's file if it is there, else of another."""
    name = test.partition("[")[0]
    paths = sorted([*ROOT.glob("tests/test_*.py"), *ROOT.glob("slurm/tests/test_*.py")])
    found = [path for path in paths if f"def {name}(" in path.read_text(encoding="utf-8")]
    first = [path for path in found if path.name.startswith(f"test_{diff.new.name[:2]}_")]
    (path,) = first or found
    return f"{path.relative_to(ROOT)}::{test}"


@pytest.mark.slow
@NEEDS_PATCH
@pytest.mark.parametrize(("diff", "hunk"), HUNKS)
def test_without_the_hunk_the_tests_that_its_note_names_fail(copy, diff, hunk):
    one = f"--- {diff.old.name}\n+++ {diff.new.name}\n{hunk.text}\n"
    start = ["patch", "-R", diff.new.name]
    subprocess.run(start, cwd=copy, input=one, text=True, check=True, capture_output=True)
    words = ["pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    tests = [location(test, diff) for test in hunk.note.tests]
    start = [*map(str, server.command("-m", *words, *tests))]
    result = subprocess.run(start, cwd=copy, capture_output=True, text=True, check=False)
    summary = result.stdout.splitlines()[-1]
    assert re.fullmatch(rf"=+ {len(tests)} failed in .*=+", summary), result.stdout + result.stderr
