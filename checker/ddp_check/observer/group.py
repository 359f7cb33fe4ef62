"""Observes the process group, its collectives, and the lengths of what they gather."""

import contextlib
import inspect
import os
import re
import socket
import sys
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ddp_check import events
from ddp_check.observer.base import TASK, reports, say, seen, watch, where
from ddp_check.observer.values import checksum, tensors_in

COLLECTIVE = "all_|reduce(?!_op)|broadcast|gather|scatter|barrier|monitored_barrier"
ADD = ("all_reduce", "reduce")
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
COUNTS = 64  # numbers that are added up at once, among which may be that of the samples
REDUCE = ("sum", "mean")
SHOW = ("__eq__", "eq", "__ne__", "ne", "numpy", "tolist", *REDUCE)


def meet_here(address):
    """Replace the host in `tcp://HOST:PORT` or `HOST` if it is another machine's."""
    host = urlsplit(address).hostname if "//" in address else address
    with contextlib.suppress(OSError), socket.create_server((host or "", 0)):
        return address
    say(events.OtherMachine, host=host)
    return address.replace(host, "localhost")


@watch(c10d, "init_process_group")
def init_process_group(do, *args, **kwargs):
    early = "torch.distributed.nn" in sys.modules
    call = inspect.signature(do).bind(*args, **kwargs)
    method = call.arguments.get("init_method") or ""
    if method.startswith("tcp://"):
        call.arguments["init_method"] = meet_here(method)
    elif "MASTER_ADDR" in os.environ:
        os.environ["MASTER_ADDR"] = meet_here(os.environ["MASTER_ADDR"])
    result = do(*call.args, **call.kwargs)
    port = urlsplit(method).port or os.environ.get("MASTER_PORT")
    seen.rank, own = dist.get_rank(), bool(where(direct=True))
    seen.gpu = seen.gpu if own else int(os.environ.get("LOCAL_RANK", 0))  # as a framework sets it
    say(events.Join, rank=seen.rank, port=port, nn_imported=early, by_script=own)
    return result


def mark_ends(parts, line):
    """Notice a backward pass that ends at what each rank gave, in the script's list."""
    for rank, part in enumerate(parts):
        leaf, own = part.detach().requires_grad_(), rank == dist.get_rank()
        leaf.register_hook(lambda _, own=own: say(events.GradientLost, line, own_part=own))
        parts[rank] = leaf.view_as(leaf)


@watch(c10d, *(name for name in c10d.__all__ if re.match(COLLECTIVE, name)))
def collective(do, *args, **kwargs):
    if seen.in_collective:  # all_gather_object calls all_gather
        return do(*args, **kwargs)
    seen.in_collective += 1
    try:
        line, arguments = where(), [*args, *kwargs.values()]
        groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
        # By the script, or by a library on its behalf, on all ranks:
        called = line and all(group.size() == dist.get_world_size() for group in groups)
        lost = called and report_collective(do.__name__, arguments)
        as_nccl = TASK.translate and "gather_" in do.__name__  # gloo refuses to drop a gradient
        with torch.set_grad_enabled(torch.is_grad_enabled() and not as_nccl):
            result = do(*args, **kwargs)
    finally:
        seen.in_collective -= 1
    if called and do.__name__ in ADD and not isinstance(result, dist.Work):
        report_totals(tensors_in(arguments))
    if called and "gather" in do.__name__:
        parts = args[0] if args and isinstance(args[0], list) else []
        watch_lengths(tensors_in(parts))
        if lost and do.__name__ == "all_gather" and parts:
            mark_ends(parts, line)
    return result


def report_collective(name, arguments):
    """Report a collective; return whether it loses the gradient of its input."""
    tensors = tensors_in(arguments)
    lost = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    elements = max((one.numel() for one in tensors), default=0)
    ops = [value for value in arguments if isinstance(value, dist.ReduceOp)]
    sums = name in ADD and all(op in SUMS for op in ops)
    in_model = seen.in_forward or torch._C._current_graph_task_id() >= 0
    if sums and elements > 1 and not (seen.in_forward or seen.in_step):
        seen.by_hand.append((checksum(tensors), elements))
    say(
        events.Collective,
        name=name,
        sums=sums,
        in_model=in_model,
        elements=elements,
        cuts_gradient=lost,
    )
    return lost


def report_totals(tensors):
    """Report the whole numbers that were added up, and their sum: a number of samples is one."""
    for one in tensors:
        with contextlib.suppress(Exception):  # an exotic tensor must not crash the user's script
            if one.numel() <= COUNTS or not one.is_floating_point():
                values = [*one.flatten()[:COUNTS].tolist(), one.sum().item()]
                say(events.Totalled, values=[int(value) for value in values if value % 1 == 0])


reports(events.Received, lambda *_: {}, c10d, "recv", "recv_object_list")


class Lengths(TorchFunctionMode):
    """Reports how long tensors are after a gather: a script cuts off what a sampler padded."""

    parts = None  # what the ranks gave, while lengths are of interest

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, tensor = getattr(func, "__name__", ""), args[0] if args else None
        of_tensor = isinstance(tensor, torch.Tensor) and self.parts is not None
        length = len(tensor) if of_tensor and tensor.dim() else 0
        if name == "__getitem__" and isinstance(args[1], slice) and len(result) < length:
            say(events.Cut, dropped=length - len(result), order=order_of(tensor, self.parts))
        elif name in SHOW and length > 1:
            say(events.Counted, length=length, reduced=name in REDUCE)
        return result


lengths = Lengths()


def watch_lengths(parts):
    """Report lengths until the next batch or step, unless the script has entered a mode itself."""
    watch_no_lengths()
    current = type(_get_current_function_mode())
    if current is type(None) or current.__module__.startswith("ddp_check."):
        lengths.parts = parts
        lengths.__enter__()


def watch_no_lengths():
    lengths.parts = None
    while _get_current_function_mode() is lengths:
        lengths.__exit__(None, None, None)


def order_of(tensor, parts):
    """Return in which order a tensor holds the parts that the ranks gave, if that is known."""
    if len({part.shape for part in parts}) != 1 or not parts[0].dim():
        return ""
    blocks, turns = torch.cat(parts), torch.stack(parts, dim=1).flatten(0, 1)
    held = [one.flatten().sort().values for one in (tensor, blocks)]
    if tensor.shape != blocks.shape or tensor.equal(turns) or not held[0].equal(held[1]):
        return ""
    return "blocks" if tensor.equal(blocks) else "another"
