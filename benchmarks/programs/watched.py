"""Runs a program as a rank, and notes its steps: watched.py PROGRAM ARGUMENTS.

WATCHED is a JSON object: the folder to write to; the steps whose time is wanted; and perhaps a
signal, which rank 0 sends at a step, to itself or, as a scheduler would, to torchrun. With a signal
all labels are 0, so that soon all predictions are right, and the number of right ones is the number
of samples that the evaluation counted.
"""

import json
import os
import resource
import runpy
import signal
import sys
import time

import sklearn.datasets
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WATCHED = json.loads(os.environ["WATCHED"])
RANK = int(os.environ["RANK"])
steps = os.open(f"{WATCHED['folder']}/steps-{RANK}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
count, times = 0, []


def peak():
    """Return the most bytes that this rank has used so far: of its GPU, or of memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def after_step(*_):
    global count  # noqa: PLW0603
    count += 1
    os.write(steps, b".")
    if count in WATCHED["steps"]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.time())
        with open(f"{WATCHED['folder']}/times-{RANK}", "w") as file:
            json.dump({"times": times, "peak": peak()}, file)
    if RANK == 0 and "signal" in WATCHED and count == WATCHED["at"]:
        kill = WATCHED["signal"] == signal.SIGKILL
        os.kill(os.getpid() if kill else os.getppid(), WATCHED["signal"])


register_optimizer_step_post_hook(after_step)
if "at" in WATCHED:
    digits = sklearn.datasets.load_digits()
    digits.target[:] = 0
    sklearn.datasets.load_digits = lambda: digits
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
