"""What the checker and the observer in the script's processes agree on. Needs no PyTorch."""

import json
import os
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = re.compile(rf"/lib(64)?/python3|/site-packages/|^<|^{re.escape(str(HERE))}/")
STACKS = signal.SIGRTMIN + 5  # asks a process for the lines that it runs
STEPS = 3  # compared between world sizes
VARIABLE = "DDP_CHECK"  # the task, in the environment of each process


def is_own(path):
    """Return whether a file is part of the script, not of a library or of the checker."""
    return not LIBRARY.search(path)


@dataclass(frozen=True)
class Task:
    """What a run is asked to show."""

    events: str  # the folder that the processes report to
    place: str  # the folder that the script runs in
    nproc: int
    scale: int = 0  # multiplies the batch and asks for double precision, unless it is 0
    translate: bool = False  # calls for GPUs

    def __str__(self):
        return json.dumps(asdict(self))


def task():
    """Return the task of this process."""
    return Task(**json.loads(os.environ[VARIABLE]))
