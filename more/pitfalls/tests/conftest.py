"""The fixtures of the pitfalls' tests."""

import pytest
from clusters import clone, cluster, submit  # noqa: F401
from running import ONE, patch_of


@pytest.fixture
def pitfall(request, tmp_path):
    """The pitfall with whose name that of the test begins."""
    return patch_of(request, tmp_path, "more/pitfalls")


@pytest.fixture
def both(pitfall, trained_with):
    """Run a pitfall's broken script and step 5, with the same changes to both."""
    return lambda *changes, args=ONE: (
        pitfall.ran(*changes, args=args),
        trained_with("05", changes, args),
    )
