"""Begins the observation of this process, and reports its end."""

import atexit
import multiprocessing.util
import os
import signal

from ddp_check.events import Exit, SigtermHandler
from ddp_check.observer import data, files, group, steps  # noqa: F401  # each patches PyTorch
from ddp_check.observer.base import TASK, harmless, is_first, report, script_line, state
from ddp_check.observer.models import describe_models
from ddp_check.observer.patches import intercept


@atexit.register  # atexit calls it last, because it is registered before the script's functions
def end():
    """Report the final weights, and that the process ends."""
    if state.pid != os.getpid() or not is_first("end"):
        return
    with harmless():
        describe_models()
    report(Exit)


def end_in_fork(_):
    """Let a forked multiprocessing.Process call `end`, which it would not do by itself.

    Such a process ends with os._exit, which skips atexit's functions, but it calls those of
    multiprocessing.util.Finalize. A fork clears these before it calls this function.
    """
    if state.pid != os.getpid():  # `state` is the parent's, so this is a fork
        multiprocessing.util.Finalize(None, end, exitpriority=-1000)  # called last


def set_handler(original, signalnum, handler):
    """Report a handler that the script sets for SIGTERM."""
    if signalnum == signal.SIGTERM and callable(handler) and script_line():
        report(SigtermHandler)
    return original(signalnum, handler)


intercept(signal, "signal", set_handler)
multiprocessing.util.register_after_fork(state, end_in_fork)
if TASK.translate:
    from ddp_check.observer import translate  # noqa: F401
if TASK.translate or TASK.scale:
    from ddp_check.observer import level  # noqa: F401
