"""Reports what a training script does, one event per line, without changing its results.

Each process writes to its own file in the folder of the events, named after its process ID.
Importing this package starts the observation.
"""

import atexit
import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ddp_check.events import Exit, SigtermHandler, Start
from ddp_check.observer import data, files  # noqa: F401  # each observes one subject
from ddp_check.observer.base import TASK, first, reports, say, seen, where
from ddp_check.observer.models import describe_models


def gloo_threads():
    try:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # one has just ended
        return gloo_threads()
    return sum("gloo" in name for name in names)


@atexit.register  # before the script can register anything, so it is called last
def end():
    if seen.pid != os.getpid() or not first("end"):
        return
    group_open = dist.is_initialized()
    describe_models()
    left = 0
    for _ in range(0 if group_open else 20):
        if not (left := gloo_threads()):
            break
        time.sleep(0.1)  # Linux lists a thread for a moment after it has ended
    nn_imported = "torch.distributed.nn" in sys.modules
    say(Exit, group_open=group_open, gloo_threads=left, nn_imported=nn_imported)


def end_as_a_copy(_):
    """Let a forked multiprocessing.Process call `end`: it runs such finalizers, but not atexit."""
    if seen.pid != os.getpid():
        multiprocessing.util.Finalize(None, end, exitpriority=-1000)


def handles(args, _):
    return args[0] == signal.SIGTERM and callable(args[1]) and where() and {}


reports(SigtermHandler, handles, signal, "signal")
multiprocessing.util.register_after_fork(seen, end_as_a_copy)
if TASK.translate:
    from ddp_check.observer import translate  # noqa: F401
say(Start, rank=seen.rank)
