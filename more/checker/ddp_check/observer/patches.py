"""Replaces functions of PyTorch with the observer's.

`@patch` names the functions that each of the observer's functions replaces. All of them exist in
PyTorch 2.8, the oldest supported version, and in 2.14; names with an underscore are private, so
they may disappear first. If one is missing, the rest is still observed, and the report says what
the checker cannot do, in the words of the docstring below the name.

Outside of PyTorch, the observer replaces `signal.signal`, and listens to audit events about files
and folders.
"""

import functools
import pkgutil
import sys

import torch

from ddp_check.events import Trouble
from ddp_check.observer.base import report

C10D = "torch.distributed.distributed_c10d"
DDP = "torch.nn.parallel.DistributedDataParallel"
SCALER = "torch.amp.GradScaler"


def patch(*names):
    """Let calls of these functions go through the decorated function.

    The decorated function gets the original as its first argument.
    """

    def decorate(function):
        for name in names:
            owner, _, last = name.rpartition(".")
            try:
                intercept(pkgutil.resolve_name(owner), last, function)
            except (ImportError, AttributeError):
                purpose = function.__doc__.partition("\n")[0]
                error = f"this PyTorch has no {name}, so the checker cannot do this: {purpose}"
                report(Trouble, error=error)
        return function

    return decorate


def intercept(owner, name, function):
    """Replace a function or method with `function`, which gets the original as first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return function(original, *args, **kwargs)

    # The original may have several names: torch.random.manual_seed is torch.manual_seed. Pickle
    # looks the replacement up in the module that defines the original.
    module = sys.modules.get(getattr(original, "__module__", None))
    for holder in (owner, module, torch, torch.distributed, torch.nn.utils):
        if getattr(holder, name, None) is original:
            setattr(holder, name, replacement)
