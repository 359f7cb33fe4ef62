"""Every hunk is needed: the tests that its note names exist, and fail without the hunk."""

import re
import subprocess
import sys

import hunks
import patches
import pytest
from support import server
from support.scripts import NEEDS_PATCH, ROOT

HUNKS = [
    pytest.param(diff, hunk, id=f"{diff.slug}-{hunk.note.slug}")
    for diff in hunks.explained(ROOT)
    for hunk in diff.hunks
]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def location(test, diff):
    """Return the id of a test, which is in the file of the diff's new step or elsewhere."""
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


def test_the_tests_that_the_notes_name_exist(collected):
    wanted = [
        location(test, diff)
        for diff in hunks.explained(ROOT)
        for hunk in diff.hunks
        for test in hunk.note.tests
    ]
    wanted += [
        location(test, patch.diff)
        for kind in patches.KINDS
        for patch in patches.collect(ROOT, kind)
        for test in patch.tests
    ]
    if others := sorted({*wanted} - collected):  # none, if this is the whole suite
        start = [sys.executable, *PYTEST, "--collect-only", *others]
        result = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.weekly
@NEEDS_PATCH
@pytest.mark.parametrize(("diff", "hunk"), HUNKS)
def test_without_the_hunk_the_tests_that_it_names_fail(copy, diff, hunk):
    one = f"--- {diff.old.name}\n+++ {diff.new.name}\n{hunk.text}\n"
    start = ["patch", "-R", diff.new.name]
    subprocess.run(start, cwd=copy, input=one, text=True, check=True, capture_output=True)
    tests = [location(test, diff) for test in hunk.note.tests]
    start = [*map(str, server.command(*PYTEST, "--everything=all", *tests))]
    result = subprocess.run(start, cwd=copy, capture_output=True, text=True, check=False)
    summary = result.stdout.splitlines()[-1]
    assert re.match(rf"{len(tests)} failed in ", summary), result.stdout + result.stderr
