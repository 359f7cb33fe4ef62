"""What the observers share: their state, wrapping a function, and reporting."""

import functools
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.utils import clip_grad
from torch.utils.data import get_worker_info

from ddp_check.events import Drawn
from ddp_check.protocol import HERE, is_own, task

TASK = task()
torch_save, torch_load = torch.save, torch.load  # before they are watched


@dataclass
class Seen:
    pid: int | None = None  # of the process that opened the file: a fork opens another
    file: int = -1
    passes: int = 0  # over a DataLoader
    steps: int = 0  # of the optimizers
    new_pass: bool = True  # no step since the last pass began
    backwards: int = 0
    forwards: list = field(default_factory=list)  # of DDP since the last step, as `Forward`
    inputs: list = field(default_factory=list)  # checksums of the batches since the last step
    losses: list = field(default_factory=list)  # likewise, whose backward pass came
    samples: int = 0  # likewise, that were loaded
    fresh: bool = False  # no model was called without gradients since the last batch
    by_hand: list = field(default_factory=list)  # [checksum, elements] that the script reduced
    in_forward: bool = False  # of DDP, which calls the unwrapped model
    in_backward: bool = False
    depth: int = 0  # of nested modules that are called
    dropout: bool = False  # a forward pass of DDP has drawn random numbers
    scaled: bool = False  # a GradScaler's factor is in the gradients
    joined: bool = False  # inside of join()
    forked: bool = False  # this process is a copy of another
    ended: bool = False  # the end has been reported
    in_collective: int = 0  # depth of nested calls; DDP's constructor counts as one
    in_step: int = 0  # likewise: one optimizer's step may call another's
    evaluated: set = field(default_factory=set)  # modules and passes in which they were called
    names: list = field(default_factory=list)  # of the parameters in the last step
    buffers: dict = field(default_factory=dict)  # {name: checksum} in the last step
    described: bool = False  # the final weights have been reported
    # The models inside DDP, kept because the script may have deleted the wrapper by the end:
    wrapped: list = field(default_factory=list)
    wrappers: list = field(default_factory=list)  # weak references to their wrappers
    loose: dict = field(default_factory=dict)  # the optimizers' parameters, by identity


seen = Seen()


def say(kind, at="", **fields):
    """Report an event. A DataLoader worker reports its random numbers alone, for its rank."""
    worker = get_worker_info() is not None
    if worker and kind is not Drawn:
        return
    pid = multiprocessing.parent_process().pid if worker else os.getpid()
    if seen.pid != pid:  # at the start, and after a fork
        seen.pid = pid
        path = os.path.join(TASK.events, f"{seen.pid}.jsonl")
        seen.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    event = kind(time=time.monotonic(), where=at or where(), **fields)
    os.write(seen.file, f"{event}\n".encode())


def where(outside=()):
    """Return the script's current line as "file:line", or an empty string outside of the script.

    The file is relative to the folder that the script runs in. Methods of these modules are left,
    and a function that replaces `print`.
    """
    frame = sys._getframe(1)
    while frame:
        path, passes_on = frame.f_code.co_filename, frame.f_code.co_name == "print"
        passes_on |= bool(outside) and id(frame.f_locals.get("self")) in outside
        if is_own(path) and not passes_on:
            return f"{relative(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def relative(path):
    return os.path.abspath(path).removeprefix(TASK.place)


def called_by_script():
    """Return whether the script itself, not a library, called the watched function."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(f"{HERE}{os.sep}"):
        frame = frame.f_back
    return frame and is_own(frame.f_code.co_filename)


ALSO = {c10d: dist, clip_grad: nn.utils}  # module -> another that has the same functions


def watch(owner, *names):
    """Replace functions or methods by one that is called with the original as first argument."""

    def decorate(function):
        for name in names:
            watched = calling(function, getattr(owner, name))
            for place in (owner, ALSO.get(owner, owner)):
                setattr(place, name, watched)
        return function

    return decorate


def report_calls(owner, names, kind, fields):
    """Report the calls for which `fields` returns the event's: it gets their arguments."""

    @watch(owner, *names.split())
    def call(do, *args, **kwargs):
        found = fields(args, kwargs)
        if isinstance(found, dict):
            say(kind, **found)
        return do(*args, **kwargs)


def calling(function, original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


def this_rank():
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def keep(name, values):
    path = os.path.join(TASK.events, name)
    torch_save(values, f"{path}.new")
    os.replace(f"{path}.new", path)
