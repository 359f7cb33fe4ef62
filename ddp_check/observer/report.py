"""What the observers share: what they have seen so far, how they watch a function and report."""

import contextlib
import functools
import json
import os
import sys
import time
import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from ddp_check.protocol import HERE, is_own, task

TASK = task()
torch_save = torch.save  # before it is watched


@dataclass
class Seen:
    """What this process has done so far."""

    pid: int | None = None  # of the process that the file belongs to: a fork opens one of its own
    file: int = -1
    passes: int = 0  # over a DataLoader
    steps: int = 0  # of the optimizers
    new_pass: bool = True  # no step has been taken since the last pass began
    backwards: int = 0
    forwards: list = field(default_factory=list)  # of DDP since the last step, as `Forward`
    in_forward: bool = False  # of DDP, which calls the plain model
    in_collective: int = 0  # of calls within each other; DDP's constructor counts as one
    in_step: int = 0  # likewise: the step of one optimizer may call that of another
    evaluated: int | None = None  # the pass after which an evaluation was last reported
    described: bool = False  # the final weights have been reported
    # The plain models inside DDP, which may themselves be gone at the end:
    wrapped: list = field(default_factory=list)
    loose: dict = field(default_factory=dict)  # what optimizers change, by identity


seen = Seen()


def say(kind, **values):
    """Report something, unless this is a worker of a DataLoader."""
    if get_worker_info():
        return
    if seen.pid != os.getpid():  # at the start, and after a fork
        seen.pid = os.getpid()
        path = os.path.join(TASK.events, f"{seen.pid}.jsonl")
        seen.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    text = json.dumps({"kind": kind, "time": time.monotonic(), **values}, default=str)
    os.write(seen.file, text.encode() + b"\n")


def where():
    """Return the line of the script that is running, as "file:line"."""
    frame = sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        if is_own(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def called_by_script():
    """Return whether the script itself, not a library, called the watched function."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(f"{HERE}{os.sep}"):
        frame = frame.f_back
    return frame and is_own(frame.f_code.co_filename)


def watch(owner, name):
    """Replace a function or method by `function(original, *arguments)`."""

    def decorate(function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, call)
        return call

    return decorate


def checksum(tensors):
    """Return a checksum of the bits of these tensors; of a sharded one, those of this rank."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        with contextlib.suppress(Exception):  # an exotic tensor must not end the reader's script
            dense = local.coalesce().values() if local.is_sparse else local
            flat = dense.detach().cpu().contiguous().flatten()
            total = zlib.crc32(flat.view(torch.uint8).numpy(), total) if flat.numel() else total
    return total


def this_rank():
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def keep(name, values):
    """Write tensors to a file for the comparison with another run."""
    path = os.path.join(TASK.events, name)
    torch_save(values, f"{path}.new")
    os.replace(f"{path}.new", path)
