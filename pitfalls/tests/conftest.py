"""The fixtures of the pitfalls' tests."""

import pytest
from clusters import clone, cluster, submit  # noqa: F401
from patching import patched
from support.jobs import finished
from support.scripts import SMALL, forked


@pytest.fixture
def both(trained_with, tmp_path):
    """Run a pitfall's broken script and step 5, with the same changes to both."""

    def run_both(name, *changes, args=("1", *SMALL)):
        broken = patched(tmp_path, f"pitfalls/{name}", *changes)
        return finished(forked(broken, *args), tmp_path), trained_with("05", changes, args)

    return run_both
