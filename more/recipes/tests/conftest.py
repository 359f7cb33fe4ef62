"""The fixture of the recipes' tests."""

import pytest
from running import patch_of


@pytest.fixture
def recipe(request, tmp_path):
    """The recipe with whose name that of the test begins."""
    return patch_of(request, tmp_path, "more/recipes")
