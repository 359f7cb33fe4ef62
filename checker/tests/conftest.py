"""The fixture of the checker's tests."""

from checking import own_folder  # noqa: F401
