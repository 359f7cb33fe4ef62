"""The page in a browser, and a copy of the repository for the generator."""

import shutil

import pytest
from browser import browser, visit  # noqa: F401
from support.scripts import ROOT


@pytest.fixture
def copy(tmp_path):
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")
    return shutil.copytree(ROOT, tmp_path / "copy", ignore=ignore)
