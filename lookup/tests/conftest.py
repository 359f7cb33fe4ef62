"""The page in a browser."""

from browser import browser, visit  # noqa: F401
