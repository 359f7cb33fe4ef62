"""The page in a browser, and a copy of the repository for the generator."""

from browser import browser, visit  # noqa: F401
from generating import copy  # noqa: F401
