"""What the observers share: their state, wrapping a function, and reporting."""

import faulthandler
import functools
import json
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
from ddp_check.protocol import HERE, STACKS, VARIABLE, Task, is_own

TASK = Task(**json.loads(os.environ[VARIABLE]))
torch_save, torch_load = torch.save, torch.load  # before they are watched


@dataclass
class Seen:
    pid: int | None = None  # of the process that opened the file: a fork opens another
    file: int = -1
    rank: int | str | None = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    known: set = field(default_factory=set)  # what need not be reported again
    passes: int = 0  # over a DataLoader
    new_pass: bool = True  # no step since the last pass began
    fresh: bool = False  # no model was called without gradients since the last batch
    steps: int = 0  # of the optimizers
    backwards: int = 0
    # Since the last step: calls of DDP, as `Forward`; checksums of the batches that entered models;
    # losses whose backward pass came; [checksum, elements] that the script reduced; samples loaded
    forwards: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    by_hand: list = field(default_factory=list)
    samples: int = 0
    in_forward: bool = False  # of DDP, which calls the unwrapped model
    in_collective: int = 0  # depth of nested calls
    in_step: int = 0  # likewise: one optimizer's step may call another's
    depth: int = 0  # of nested modules that are called
    dropout: bool = False  # a forward pass of DDP has drawn random numbers
    scaled: bool = False  # a GradScaler's factor is in the gradients
    gpu: int = 0  # that "cuda" means
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
        path, how = os.path.join(TASK.events, str(pid)), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        seen.file = os.open(f"{path}.jsonl", how)
        faulthandler.register(STACKS, os.open(f"{path}.stack", how), all_threads=False)
    os.write(seen.file, f"{kind(time=time.monotonic(), where=at or where(), **fields)}\n".encode())


def first(*key):
    """Return whether this is asked for the first time."""
    known = key in seen.known
    seen.known.add(key)
    return not known


def where(outside=(), direct=False):
    """Return the script's current line as "file:line", or an empty string outside of the script.

    The file is relative to the folder that the script runs in. Methods of these modules are left,
    and a function that replaces `print`. Directly: not if a library called the watched function.
    """
    frame = sys._getframe(1)
    while frame:
        path, passes_on = frame.f_code.co_filename, frame.f_code.co_name == "print"
        passes_on |= bool(outside) and id(frame.f_locals.get("self")) in outside
        if is_own(path) and not passes_on:
            return f"{os.path.abspath(path).removeprefix(TASK.place)}:{frame.f_lineno}"
        if direct and not path.startswith(f"{HERE}{os.sep}"):
            return ""
        frame = frame.f_back
    return ""


ALSO = {c10d: dist, clip_grad: nn.utils}  # module -> another that has the same functions


def watch(owner, *names):
    """Replace functions or methods by one that is called with the original as first argument."""

    def decorate(function):
        for name in names:
            original = getattr(owner, name)

            @functools.wraps(original)
            def call(*args, _do=original, **kwargs):
                return function(_do, *args, **kwargs)

            for place in (owner, ALSO.get(owner, owner)):
                setattr(place, name, call)
        return function

    return decorate


def reports(kind, fields, owner, *names):
    """Report calls if this function of their arguments returns the event's fields."""

    @watch(owner, *names)
    def call(do, *args, **kwargs):
        found = fields(args, kwargs)
        if isinstance(found, dict):
            say(kind, **found)
        return do(*args, **kwargs)


def keep(name, values):
    """Save the values of rank 0."""
    if int(seen.rank or 0):
        return
    path = os.path.join(TASK.events, name)
    torch_save(values, f"{path}.new")
    os.replace(f"{path}.new", path)
