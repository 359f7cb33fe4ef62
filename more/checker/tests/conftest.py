"""The fixtures of the checker's tests."""

from checking import fork_ranks, own_folder  # noqa: F401
