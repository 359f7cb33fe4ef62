"""Begins the observation of this process, and reports its end."""

import atexit
import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ddp_check.events import Exit, SigtermHandler, Start, Unpatched
from ddp_check.observer import data, files, losses, steps  # noqa: F401  # each observes a subject
from ddp_check.observer.base import TASK, ask, harmless, is_first, report, script_line, state
from ddp_check.observer.models import describe_models
from ddp_check.observer.patches import missing, replace


def count_gloo_threads():
    threads = Path("/proc/self/task")
    names = [
        ask((threads / number / "comm").read_text)
        for number in ask(os.listdir, threads, default=())
    ]
    return sum("gloo" in name for name in names if name)  # None: the thread has just ended


@atexit.register  # before the script can register anything, so it is called last
def end():
    """Report the final weights, and what is left of the process group."""
    if state.pid != os.getpid() or not is_first("end"):
        return
    group_open = dist.is_initialized()
    with harmless:
        describe_models()
    threads = 0
    for _ in range(0 if group_open else 20):
        threads = count_gloo_threads()
        if not threads:
            break
        time.sleep(0.1)  # Linux lists a thread for a moment after it has ended
    nn_imported = "torch.distributed.nn" in sys.modules
    report(Exit, group_open=group_open, gloo_threads=threads, nn_imported=nn_imported)


def end_as_a_copy(_):
    """Let a forked multiprocessing.Process call `end`: it runs such finalizers, but not atexit."""
    if state.pid != os.getpid():
        multiprocessing.util.Finalize(None, end, exitpriority=-1000)


def set_handler(original, number, handler):
    if number == signal.SIGTERM and callable(handler) and script_line():
        report(SigtermHandler)
    return original(number, handler)


replace(signal, "signal", set_handler)
multiprocessing.util.register_after_fork(state, end_as_a_copy)
if TASK.translate:
    from ddp_check.observer import translate  # noqa: F401
report(Start, rank=state.rank)
for entry in missing:
    report(Unpatched, name=entry.name, lacks=entry.lacks)
