"""The generator of the diffs and pages, run in a copy of the repository."""

import shutil
import subprocess
import sys

import pytest
from support.scripts import ROOT, SCRIPTS


def generate(root, *words):
    """Run the generator of a copy of the repository, from another folder."""
    start = [sys.executable, root / "diffs" / "generate.py", *words]
    return subprocess.run(start, capture_output=True, text=True, check=False, cwd="/")


def copy_to(folder):
    """Copy what the generator and the scripts' tests read."""
    names = ("ddp_check", "diffs", "exercise", "pitfalls", "recipes", "slurm", "tests")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*SCRIPTS, ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def copy(tmp_path):
    return copy_to(tmp_path / "copy")
