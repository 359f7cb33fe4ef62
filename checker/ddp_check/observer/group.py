"""Observes the process group and its collectives."""

import contextlib
import functools
import os
import re
import socket
import sys
import time
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from ddp_check import events
from ddp_check.observer.models import describe_models
from ddp_check.observer.report import called_by_script, checksum, say, seen, watch, where

COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "scatter",
    "reduce_scatter_tensor",
    "scatter_object_list",
    "all_to_all",
    "all_to_all_single",
]


def is_here(host):
    """Return whether an address or a name is that of this machine."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family) as probe:
                probe.bind(address)
                return True
    return False


def meet_here(address):
    """Replace the host in `tcp://HOST:PORT` or `HOST` if it is another machine's."""
    host = urlsplit(address).hostname if "//" in address else address
    if not host or is_here(host):
        return address
    say(events.OtherMachine(host=host))
    return address.replace(host, "localhost")


@watch(c10d, "init_process_group")
def init_process_group(do, *args, **kwargs):
    early = "torch.distributed.nn" in sys.modules
    method = str(kwargs.get("init_method") or "")
    if method.startswith("tcp://"):
        kwargs["init_method"] = meet_here(method)
    elif "MASTER_ADDR" in os.environ:
        os.environ["MASTER_ADDR"] = meet_here(os.environ["MASTER_ADDR"])
    result = do(*args, **kwargs)
    method = str(kwargs.get("init_method") or (args[1] if len(args) > 1 else ""))
    address = re.fullmatch(r"tcp://.*:(\d+).*", method)
    port = address[1] if address else os.environ.get("MASTER_PORT")
    own = bool(called_by_script())
    say(events.Join(rank=dist.get_rank(), port=port, nn=early, own=own))
    return result


@watch(c10d, "destroy_process_group")
def destroy_process_group(do, *args, **kwargs):
    describe_models()
    say(events.Leave(models=sum(one() is not None for one in seen.wrappers)))
    time.sleep(0.05)  # gloo's threads forget their last work, or freeing a DDP model could hang
    return do(*args, **kwargs)


def is_of_all(arguments):
    """Return whether a collective with these arguments involves all ranks."""
    groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
    return all(group is dist.group.WORLD for group in groups)


LENGTHS = ("__getitem__", "__eq__", "eq", "sum", "mean", "numpy", "tolist")


def watch_lengths(parts):
    """Until the next batch, report how long tensors are: a script cuts a sampler's padding off.

    The parts are what a gather returned, one of each rank.
    """
    for name in LENGTHS if not seen.gathered else ():
        do = getattr(torch.Tensor, name)
        seen.gathered[name] = do
        setattr(torch.Tensor, name, watched_length(name, do, set(), parts))


def watched_length(name, do, said, parts):
    @functools.wraps(do)
    def method(tensor, *args, **kwargs):
        result = do(tensor, *args, **kwargs)
        length = len(tensor) if tensor.dim() else 0
        if name == "__getitem__":
            cut = isinstance(args[0], slice) and length - len(result)
            if cut and ("cut", cut) not in said:
                said.add(("cut", cut))
                say(events.Cut(dropped=cut, blocks=in_blocks(tensor, parts)))
        elif length > 1 and length not in said:
            said.add(length)
            say(events.Counted(length=length))
        return result

    return method


def in_blocks(tensor, parts):
    """Return whether a tensor is what one rank gave after what another gave, not in turns."""
    if len(parts) < 2 or any(part.shape != parts[0].shape for part in parts):
        return False
    blocks, turns = torch.cat(parts), torch.stack(parts, dim=1).flatten(0, 1)
    return tensor.equal(blocks) and not tensor.equal(turns)


def sums(name, arguments):
    """Return whether a collective adds numbers up: (all_)reduce without another operation."""
    ops = [value for value in arguments if isinstance(value, dist.ReduceOp)]
    return name in ("all_reduce", "reduce") and all(
        op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) for op in ops
    )


class End(torch.autograd.Function):
    """Marks the result of a gather, so that a backward pass that ends there is noticed."""

    @staticmethod
    def forward(ctx, value, start, line, own):
        ctx.line, ctx.own = line, own
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        say(events.GradientLost(own=ctx.own, where=ctx.line))
        return None, None, None, None


def mark_ends(parts, line):
    """Mark what each rank gave, in the script's list."""
    start = torch.zeros((), requires_grad=True)
    for rank, part in enumerate(parts):
        parts[rank] = End.apply(part, start, line, rank == dist.get_rank())


def watch_collective(name):
    @watch(c10d, name)
    def collective(do, *args, **kwargs):
        line = where()
        outer = not seen.in_collective and is_of_all([*args, *kwargs.values()])
        tensors = [one for one in tree_leaves([args, kwargs]) if isinstance(one, torch.Tensor)]
        lost = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        elements = max((one.numel() for one in tensors), default=0)
        adds = sums(name, [*args, *kwargs.values()])
        if outer and line and adds and elements > 1 and not (seen.in_forward or seen.in_step):
            seen.by_hand.append((checksum(tensors), elements))
        told = outer and line  # called by the script, or by a library on its behalf
        if told:
            inside = seen.in_forward
            say(
                events.Collective(
                    name=name, adds=adds, inside=inside, elements=elements, gradient=lost
                )
            )
        seen.in_collective += 1  # all_gather_object calls all_gather
        try:
            result = do(*args, **kwargs)
        finally:
            seen.in_collective -= 1
        if not told:
            return result
        if "gather" in name:
            parts = args[0] if args and isinstance(args[0], list) else []
            watch_lengths([part for part in parts if isinstance(part, torch.Tensor)])
            if lost and name == "all_gather" and parts:
                mark_ends(parts, line)
        return result


for name in COLLECTIVES:
    watch_collective(name)
for name in (*COLLECTIVES, "init_process_group", "destroy_process_group"):
    setattr(dist, name, getattr(c10d, name))
