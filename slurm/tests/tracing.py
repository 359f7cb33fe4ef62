"""Inspecting running processes with py-spy."""

import os
import time
from pathlib import Path


def may_trace():
    """Return whether the system lets py-spy inspect processes that it did not start."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() == 0 or not scope.exists() or scope.read_text() == "0\n"


def look_until(right, ask):
    """Return the first right answer: the other ranks may still be on their way."""
    end = time.monotonic() + 120
    while not right(answer := ask()):
        assert time.monotonic() < end, answer
    return answer
