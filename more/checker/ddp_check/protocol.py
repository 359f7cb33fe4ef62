"""What the checker and the observer both use. This module does not import PyTorch."""

import functools
import json
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = re.compile(rf"/lib(64)?/python3|/site-packages/|^<|^{re.escape(str(HERE))}/")
FRAME = re.compile(r' *File "(.+)", line (\d+)')  # matches a frame of a traceback
STACKS = signal.SIGRTMIN + 5  # signal that makes a process write its stack
STEPS = 3  # number of steps that are compared between world sizes
PROTECTED = "ddp-check does not let the script change"  # beginning of the message of an error
VARIABLE = "DDP_CHECK"  # environment variable that holds the task


@functools.cache
def is_own(path):
    """Return whether a file is part of the script, not of a library or of the checker."""
    return not LIBRARY.search(path)


def own_frame(line):
    """Return "path:line" if this line of a traceback names a line of the script, or ""."""
    match = FRAME.match(line)
    return f"{match[1]}:{match[2]}" if match and is_own(match[1]) else ""


@dataclass(frozen=True)
class Task:
    """How a run is to be observed."""

    events: str  # folder that the processes report to
    folder: str  # folder that the script runs in, with a slash at its end
    nproc: int  # number of processes
    scale: int = 0  # factor for the batch size; unless it is 0, the run uses float64
    translate: bool = False  # whether GPU calls are translated for the CPU
    start: str = ""  # folder with the weights from which the models start
    pause: float = 0.0  # seconds to wait before each step of an optimizer

    def __str__(self):
        return json.dumps(asdict(self))
