"""Runs the generator of the diffs and pages in a copy of the repository."""

import shutil
import subprocess
import sys

import pytest
from support.scripts import ROOT, SCRIPTS


def generate(root, *words):
    """Run a copy's generator, from a different working directory."""
    start = [sys.executable, root / "diffs" / "generate.py", *words]
    return subprocess.run(start, capture_output=True, text=True, check=False, cwd="/")


def copy_to(folder):
    """Copy what the generator and the tests of the scripts read; return the folder."""
    names = (
        "benchmarks",
        "without_slurm",
        "ddp_check",
        "diffs",
        "exercise",
        "lookup",
        "pitfalls",
        "recipes",
        "slurm",
        "tests",
    )
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*SCRIPTS, ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def copy(tmp_path):
    return copy_to(tmp_path / "copy")
