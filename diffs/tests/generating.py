"""Runs the generator of the diffs and pages, here or in a copy of the repository."""

import shutil
import subprocess
import sys

import pytest
from support.scripts import ROOT

SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")


def generate(root, *words):
    """Run a copy's generator, from a different working directory."""
    start = [sys.executable, root / "diffs" / "generate.py", *words]
    return subprocess.run(start, capture_output=True, text=True, check=False, cwd="/")


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(ROOT, tmp_path / "copy", ignore=SKIPPED)
