"""Cleans up after the checker, however it ends: by itself, by Ctrl-C, by SIGTERM or by SIGKILL.

A process of its own waits until the checker has gone, kills what it started, and removes its
temporary folder. A cleanup inside the checker would not survive a signal.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddp_check.protocol import HERE, VARIABLE


@contextlib.contextmanager
def kept_folder():
    """Yield a temporary folder; at the end, kill what reports to it, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="ddp_check-")).resolve()
    keeper = subprocess.Popen(
        [sys.executable, "-m", "ddp_check.keeper", folder],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        start_new_session=True,  # Ctrl-C and a scheduler's signals must not reach it
    )
    try:
        yield folder
    finally:
        keeper.communicate()  # closes the pipe that it waits at


def processes(folder):
    """Return the observed processes, with all descendants, that report to a folder or inside it."""
    import psutil  # takes a while, and the keeper needs it only at the end

    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            asked = candidate.environ().get(VARIABLE)
            if asked and Path(json.loads(asked)["events"]).is_relative_to(folder):
                found.append(candidate)
    return found


def kill(folder):
    """Kill all processes that report to a folder or inside it; return how many there were."""
    import psutil

    found = processes(folder)
    for candidate in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            candidate.kill()
    return len(found)


def main(folder):
    """Wait for the end of the checker, and clean up."""
    sys.stdin.read()
    end = time.monotonic() + 30
    while kill(folder) and time.monotonic() < end:
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
