"""The page diffs/index.html in a browser."""

from browser import browser, visit  # noqa: F401
