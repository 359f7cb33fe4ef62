"""Makes each rank write the names of its threads to its own file at exit.

Python runs this file at startup, and so before PyTorch, if its folder is on PYTHONPATH. The server
of forked ranks runs it first, for the same reason.
"""

import atexit
import json
import multiprocessing
import os
import time
from pathlib import Path


def report():
    # Registered first, so called after all other atexit functions.
    folder = os.environ.get("DDP_LADDER_EXITS")
    is_rank = "RANK" in os.environ or multiprocessing.parent_process()
    if folder and is_rank:  # neither torchrun nor step 2's parent
        time.sleep(1)  # Linux lists a thread for a moment after it has ended
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        with open(f"{folder}/{os.getpid()}", "w") as file:
            json.dump(names, file)


atexit.register(report)
