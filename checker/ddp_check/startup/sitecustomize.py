"""Python imports this file at startup; a process then reports what it does with PyTorch."""

import importlib
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load(name):
    """Import a module of the checker."""
    sys.path.insert(0, ROOT)  # only for this import: the script must find its own modules
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(ROOT)


if "DDP_CHECK" in os.environ and "resource_tracker" not in str(sys.orig_argv):
    # In a process that was forked by one that has imported torch, the observation starts at once.
    load("ddp_check.imports").after_import("torch", lambda: load("ddp_check.observer.start"))
