"""Observes how long tensors are after a gather: a script cuts off what a sampler padded."""

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ddp_check.events import Counted, Cut
from ddp_check.observer.report import say

REDUCE = ("sum", "mean")
SHOW = ("__eq__", "eq", "__ne__", "ne", "numpy", "tolist", *REDUCE)
entered = []  # modes: the last watches now


class Lengths(TorchFunctionMode):
    """Reports lengths. The parts are what a gather returned, one a rank."""

    def __init__(self, parts):
        self.parts, self.said, self.over = parts, set(), False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        length = len(first) if isinstance(first, torch.Tensor) and first.dim() else 0
        if name == "__getitem__" and isinstance(args[1], slice) and len(result) < length:
            self.tell(Cut, dropped=length - len(result), order=order_of(first, self.parts))
        elif name in SHOW and length > 1:
            self.tell(Counted, length=length, reduced=name in REDUCE)
        return result

    def tell(self, kind, **fields):
        if str(fields) not in self.said and not self.over:
            self.said.add(str(fields))
            say(kind, **fields)


def watch_lengths(parts):
    """Report lengths until the next batch or step, unless the script has entered a mode itself."""
    watch_no_lengths()
    current = type(_get_current_function_mode())
    if current is type(None) or current.__module__.startswith("ddp_check."):
        entered.append(Lengths(parts))
        entered[-1].__enter__()


def watch_no_lengths():
    for mode in entered:
        mode.over = True
    while entered and _get_current_function_mode() is entered[-1]:
        entered.pop().__exit__(None, None, None)


def order_of(tensor, parts):
    """Return in which order a tensor holds the parts that the ranks gave, if that is known."""
    if len({part.shape for part in parts}) != 1 or not parts[0].dim():
        return ""
    blocks, turns = torch.cat(parts), torch.stack(parts, dim=1).flatten(0, 1)
    if tensor.shape != blocks.shape or tensor.equal(turns):
        return ""
    if tensor.equal(blocks):
        return "blocks"
    same = tensor.flatten().sort().values.equal(blocks.flatten().sort().values)
    return "another" if same else ""
