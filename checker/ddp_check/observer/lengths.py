"""Observes how long tensors are after a gather: a script leaves out what a sampler padded."""

import functools

import torch

from ddp_check.events import Counted
from ddp_check.observer.report import say

REDUCE = ("sum", "mean")
METHODS = ("__eq__", "eq", "__ne__", "ne", "numpy", "tolist", *REDUCE)
watching = []  # methods that Tensor has inherited, and that are watched now


def watch_lengths(parts):
    """Report lengths until the next batch or step; the parts are what a gather returned.

    Not by __getitem__: with one of its own, a tensor would be a sequence for torch.tensor.
    """
    watch_no_lengths()
    said = set()
    for name in METHODS:
        setattr(torch.Tensor, name, watched(name, said, parts))
        watching.append(name)


def watch_no_lengths():
    for name in watching:
        delattr(torch.Tensor, name)
    watching.clear()


def watched(name, said, parts):
    do = getattr(torch.Tensor, name)

    @functools.wraps(do)
    def method(tensor, *args, **kwargs):
        length = len(tensor) if tensor.dim() else 0
        blocks = length > 1 and any(in_blocks(one, parts) for one in (tensor, *args))
        key = length, name in REDUCE, blocks
        if length > 1 and key not in said:
            said.add(key)
            say(Counted, length=length, reduced=name in REDUCE, blocks=blocks)
        return do(tensor, *args, **kwargs)

    return method


def in_blocks(tensor, parts):
    """Return whether a tensor is the beginning of what one rank gave after what another gave."""
    same = isinstance(tensor, torch.Tensor) and len({part.shape for part in parts}) == 1
    first = parts[0] if same else None
    if not same or not first.dim() or (tensor.dtype, tensor.dim()) != (first.dtype, first.dim()):
        return False
    count = len(tensor)
    if count >= len(parts) * len(first) or tensor.shape[1:] != first.shape[1:]:
        return False
    blocks, turns = torch.cat(parts), torch.stack(parts, dim=1).flatten(0, 1)
    return tensor.equal(blocks[:count]) and not tensor.equal(turns[:count])
