"""Lets each rank write the names of its threads to a file of its own when it exits.

Python runs this file before any script if its folder is on PYTHONPATH, and so before PyTorch, too.
The server of forked ranks imports it first, for the same reason.
"""

import atexit
import json
import multiprocessing
import os
import time
from pathlib import Path


def report():
    # Called after all other atexit functions, because it is registered before them.
    folder = os.environ.get("DDP_LADDER_EXITS")
    is_rank = "RANK" in os.environ or multiprocessing.parent_process()
    if folder and is_rank:  # so neither torchrun nor step 2's parent
        time.sleep(1)  # Linux lists a thread for a moment after it has ended
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        with open(f"{folder}/{os.getpid()}", "w") as file:
            json.dump(names, file)


atexit.register(report)
