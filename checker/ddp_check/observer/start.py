"""Begins the observation of this process, and reports its end."""

import atexit
import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_check.events import Exit, SigtermHandler
from ddp_check.observer import data, files, losses, steps  # noqa: F401  # each observes a subject
from ddp_check.observer.base import TASK, ask, harmless, is_first, report, script_line, state
from ddp_check.observer.models import describe_models
from ddp_check.observer.patches import intercept

# PyTorch 2.13 gives gloo's threads a name, 2.10 does not. A TorchVersion compares numbers, so
# "2.9" is less.
NAMES_THREADS = torch.__version__ >= "2.13"


@atexit.register  # before the script can register anything, so it is called last
def end():
    """Report the final weights, and what is left of the process group."""
    if state.pid != os.getpid() or not is_first("end"):
        return
    with harmless():
        describe_models()
    group_open = dist.is_initialized()
    threads = None
    if NAMES_THREADS:
        threads = 0 if group_open else gloo_threads_that_stay()
    report(
        Exit,
        group_open=group_open,
        gloo_threads=threads,
        nn_imported="torch.distributed.nn" in sys.modules,
        modules=modules_of_script(),
    )


def modules_of_script():
    """Return the files of all modules in the script's folder, relative to it."""
    paths = [ask(getattr, module, "__file__") or "" for module in [*sys.modules.values()]]
    return [path.removeprefix(TASK.folder) for path in paths if path.startswith(TASK.folder)]


def end_in_fork(_):
    """Let a forked multiprocessing.Process call `end`, which it would not do by itself.

    It ends with os._exit, without the functions of atexit, but with those of
    multiprocessing.util.Finalize. A fork clears these, and calls this afterwards.
    """
    if state.pid != os.getpid():  # its parent's; a spawned process has a state of its own
        multiprocessing.util.Finalize(None, end, exitpriority=-1000)  # the last to be called


def gloo_threads_that_stay():
    """Return how many threads of gloo are there two seconds after the group was destroyed."""
    end = time.monotonic() + 2
    while True:
        paths = ask(list, Path("/proc/self/task").glob("*/comm"), default=())
        count = sum("gloo" in ask(path.read_text, default="") for path in paths)
        if not count or time.monotonic() > end:
            return count
        time.sleep(0.1)  # Linux lists a thread for a moment after it has ended


def set_handler(original, signalnum, handler):
    """Report a handler that the script sets for SIGTERM."""
    if signalnum == signal.SIGTERM and callable(handler) and script_line():
        report(SigtermHandler)
    return original(signalnum, handler)


intercept(signal, "signal", set_handler)
multiprocessing.util.register_after_fork(state, end_in_fork)
if TASK.translate:
    from ddp_check.observer import translate  # noqa: F401
