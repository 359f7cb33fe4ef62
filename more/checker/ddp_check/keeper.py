"""Cleans up after the checker, however it ends: by itself, by Ctrl-C, by SIGTERM or by SIGKILL.

The keeper is a separate process. It waits until the checker has ended, kills what the checker has
started, and removes its temporary folder. SIGKILL would prevent a cleanup inside the checker.
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

import psutil

from ddp_check.protocol import HERE, VARIABLE


@contextlib.contextmanager
def kept_folder():
    """Yield a temporary folder; at the end, kill the processes that report to it, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="ddp_check-")).resolve()
    paths = filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])  # to find psutil, too
    keeper = subprocess.Popen(
        [sys.executable, "-m", "ddp_check.keeper", folder],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C and a scheduler's signals must not reach it
    )
    try:
        yield folder
    finally:
        keeper.communicate()  # closes the pipe that the keeper reads from


def observed_process(pid, folder):
    """Return the process that reports to this folder under this ID, or None if it has ended.

    The system may have given the ID to another process, which has not opened this events file.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if any(file.path == f"{folder}/{pid}.jsonl" for file in process.open_files()):
            return process


def signal_processes(folder, method):
    """Terminate or kill all processes that report to a folder or inside it; return how many."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            task = process.environ().get(VARIABLE)
            if task and Path(json.loads(task)["events"]).is_relative_to(folder):
                getattr(process, method)()
                count += 1
    return count


if __name__ == "__main__":
    sys.stdin.read()  # returns when the checker has ended
    end = time.monotonic() + 30
    while signal_processes(sys.argv[1], "kill") and time.monotonic() < end:
        time.sleep(0.05)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
