"""The diffs are those of the scripts, and `patch` agrees."""

import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
from conftest import ROOT, SCRIPTS

STEPS = list(pairwise(SCRIPTS))


def generate(root, *words):
    """Run the generator of a copy of the repository."""
    start = [sys.executable, root / "diffs" / "generate.py", *words]
    return subprocess.run(start, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    return tmp_path


def test_nothing_is_stale():
    result = generate(ROOT, "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_what_is_stale_is_named_and_written_anew(copy):
    script, diff = copy / SCRIPTS[1].name, copy / "diffs" / "01_to_02.diff"
    script.write_text(script.read_text(encoding="utf-8") + "# more\n", encoding="utf-8")
    diff.unlink()
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert result.stdout.split() == [
        "stale:",
        "diffs/01_to_02.diff",
        "stale:",
        "diffs/02_to_03.diff",
    ]
    assert not diff.exists()
    assert generate(copy).returncode == 0
    assert "+# more\n" in diff.read_text(encoding="utf-8")
    assert generate(copy, "--check").returncode == 0


@pytest.mark.skipif(not shutil.which("patch"), reason="needs the program patch")
@pytest.mark.parametrize(("old", "new"), STEPS, ids=lambda path: path.name[:2])
def test_patch_makes_each_step_of_the_one_before(copy, old, new):
    diff = copy / "diffs" / f"{old.name[:2]}_to_{new.name[:2]}.diff"
    with diff.open("rb") as file:
        subprocess.run(["patch", old.name], cwd=copy, stdin=file, check=True, capture_output=True)
    assert (copy / old.name).read_bytes() == new.read_bytes()
