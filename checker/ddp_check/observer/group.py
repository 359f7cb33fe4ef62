"""Observes the process group and its collectives."""

import contextlib
import functools
import inspect
import os
import socket
import sys
import time
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_check import events
from ddp_check.observer.lengths import watch_lengths
from ddp_check.observer.models import describe_models
from ddp_check.observer.report import called_by_script, report_calls, say, seen, watch, where
from ddp_check.observer.values import checksum, tensors_in

COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "broadcast_object_list", "barrier"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
    *("scatter", "scatter_object_list", "reduce_scatter_tensor", "monitored_barrier"),
    *("all_to_all", "all_to_all_single"),
)
ADD = ("all_reduce", "reduce")
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
COUNTS = 64  # numbers that are added up at once, among which may be that of the samples
RECEIVE = "recv recv_object_list"


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
    own = bool(called_by_script())
    say(events.Join, rank=dist.get_rank(), port=port, nn=early, own=own)
    return result


@watch(c10d, "destroy_process_group")
def destroy_process_group(do, *args, **kwargs):
    describe_models()
    say(events.Leave, models=sum(one() is not None for one in seen.wrappers))
    time.sleep(0.05)  # gloo's threads forget their last work, or freeing a DDP model could hang
    return do(*args, **kwargs)


def mark_ends(parts, line):
    """Notice a backward pass that ends at what each rank gave, in the script's list."""

    def told(own, _):
        say(events.GradientLost, line, own=own)

    for rank, part in enumerate(parts):
        leaf = part.detach().requires_grad_()
        leaf.register_hook(functools.partial(told, rank == dist.get_rank()))
        parts[rank] = leaf.view_as(leaf)


@watch(c10d, *COLLECTIVES)
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
    adds = name in ADD and all(op in SUMS for op in ops)
    inside = seen.in_forward
    if adds and elements > 1 and not (inside or seen.in_step):
        seen.by_hand.append((checksum(tensors), elements))
    say(events.Collective, name=name, adds=adds, inside=inside, elements=elements, gradient=lost)
    return lost


def report_totals(tensors):
    """Report the whole numbers that were added up, and their sum: a number of samples is one."""
    for one in tensors:
        with contextlib.suppress(Exception):  # an exotic tensor must not crash the user's script
            if one.numel() <= COUNTS or not one.is_floating_point():
                values = [*one.flatten()[:COUNTS].tolist(), one.sum().item()]
                say(events.Totalled, values=[int(value) for value in values if value % 1 == 0])


report_calls(c10d, RECEIVE, events.Received, lambda *_: {})
