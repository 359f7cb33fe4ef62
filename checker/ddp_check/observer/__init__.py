"""Reports what a training script does, one event per line, without changing its results.

Each process writes to its own file in the folder of the events, named after its process ID.
Importing this package starts the observation.
"""

import atexit
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ddp_check.events import Exit, Handler, Start
from ddp_check.observer import data, files, group  # noqa: F401  # each observes one subject
from ddp_check.observer.models import describe_models
from ddp_check.observer.report import TASK, say, seen, watch, where
from ddp_check.protocol import STACKS


@watch(signal, "signal")
def handle(do, number, handler):
    if number == signal.SIGTERM and handler not in (signal.SIG_DFL, signal.SIG_IGN) and where():
        say(Handler)
    return do(number, handler)


def gloo_threads():
    try:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # one has just ended
        return gloo_threads()
    return sum("gloo" in name for name in names)


@atexit.register  # before the script can register anything, so it is called last
def end():
    if seen.pid != os.getpid() or seen.ended:
        return
    seen.ended = True
    open_group = dist.is_initialized()
    if not seen.described:
        describe_models()
    tries = 0 if open_group else 20
    while (left := tries and gloo_threads()) and tries > 1:
        tries -= 1  # Linux lists a thread for a moment after it has ended
        time.sleep(0.1)
    nn = "torch.distributed.nn" in sys.modules
    say(Exit, open_group=open_group, threads=left, nn=nn)


def end_as_a_copy(_):
    """Let a forked multiprocessing.Process call `end`: it runs such finalizers, but not atexit."""
    if seen.forked:
        seen.ended = False
        multiprocessing.util.Finalize(None, end, exitpriority=-1000)


os.register_at_fork(after_in_child=lambda: setattr(seen, "forked", True))
multiprocessing.util.register_after_fork(seen, end_as_a_copy)
stacks = open(os.path.join(TASK.events, f"{os.getpid()}.stack"), "w", encoding="utf-8")  # noqa: SIM115
faulthandler.register(STACKS, file=stacks, all_threads=False)
if TASK.translate:
    from ddp_check.observer import translate  # noqa: F401
say(Start, rank=os.environ.get("RANK", os.environ.get("SLURM_PROCID")))
