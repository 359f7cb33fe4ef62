"""Observes how long tensors are in an evaluation: a script leaves out what a sampler padded."""

import functools

import torch

from ddp_check.events import Counted, Cut
from ddp_check.observer.report import say, seen

REDUCE = ("sum", "mean")
METHODS = ("__getitem__", "__eq__", "eq", "numpy", "tolist", *REDUCE)
originals = {}  # methods of Tensor while they are watched


def watch_lengths(parts=None):
    """Report lengths until the next batch or step.

    The parts are what a gather returned, one a rank. Before a gather, only cuts are reported.
    """
    watch_no_lengths()
    said = set()
    for name in METHODS[:1] if parts is None else METHODS:
        originals[name] = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, watched(name, said, parts))


def watch_no_lengths():
    for name, method in originals.items():
        setattr(torch.Tensor, name, method)
    originals.clear()


def watched(name, said, parts):
    do = originals[name]

    @functools.wraps(do)
    def method(tensor, *args, **kwargs):
        result = do(tensor, *args, **kwargs)
        length = len(tensor) if tensor.dim() else 0
        if name == "__getitem__":
            dropped = 0 if parts is None and seen.depth else dropped_by(args[0], length)
            if dropped and ("cut", dropped) not in said:
                said.add(("cut", dropped))
                say(Cut, dropped=dropped, order=order_of(tensor, parts or ()))
        elif length > 1 and (name in REDUCE, length) not in said:
            said.add((name in REDUCE, length))
            say(Counted, length=length, reduced=name in REDUCE)
        return result

    return method


def dropped_by(index, length):
    """Return how many elements a slice or a mask leaves out."""
    if isinstance(index, slice):
        return length - len(range(length)[index])
    mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() == 1
    return len(index) - int(index.count_nonzero()) if mask else 0


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
