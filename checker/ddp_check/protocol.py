"""What the checker shares with the observer in the script's processes. Does not import PyTorch."""

import functools
import json
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = re.compile(rf"/lib(64)?/python3|/site-packages/|^<|^{re.escape(str(HERE))}/")
FRAME = re.compile(r' *File "(.+)", line (\d+)')  # in a traceback
STACKS = signal.SIGRTMIN + 5  # asks a process for its stack
STEPS = 3  # how many are compared between world sizes
VARIABLE = "DDP_CHECK"  # holds the task, in the environment of each process


@functools.cache
def is_own(path):
    """Return whether a file is part of the script, not of a library or of the checker."""
    return not LIBRARY.search(path)


def own_frame(line):
    """Return "path:line" if this line of a traceback names one of the script, else ""."""
    match = FRAME.match(line)
    return f"{match[1]}:{match[2]}" if match and is_own(match[1]) else ""


@dataclass(frozen=True)
class Task:
    """How a run is to be observed."""

    events: str  # the folder that the processes report to
    folder: str  # that the script runs in, with a slash at its end
    nproc: int
    scale: int = 0  # unless 0: multiply the batch by this, and use double precision
    translate: bool = False  # GPU calls, for the CPU
    start: str = ""  # a folder with weights for the models to start from
    pause: float = 0.0  # seconds to wait before each step of an optimizer

    def __str__(self):
        return json.dumps(asdict(self))
