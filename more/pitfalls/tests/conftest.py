"""The fixtures of the pitfalls' tests."""

import pytest
from clusters import clone, cluster, submit  # noqa: F401
from running import patch_of


@pytest.fixture
def pitfall(request, tmp_path):
    """The pitfall with whose name that of the test begins."""
    return patch_of(request, tmp_path, "more/pitfalls")
