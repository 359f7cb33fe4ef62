"""Observes the process group and its collectives."""

import contextlib
import inspect
import os
import re
import socket
import threading
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_check import events
from ddp_check.observer.base import (
    TASK,
    ask,
    depth_of_steps,
    harmless,
    in_backward,
    report,
    script_line,
    state,
)
from ddp_check.observer.patches import C10D, patch
from ddp_check.observer.values import tensors_in

COLLECTIVE = "all_|reduce(?!_op)|broadcast|gather|scatter|barrier|monitored_barrier"
REDUCTIONS = ("all_reduce", "reduce")
MAX_COUNTS = 64  # a tensor with more numbers than this holds no counts of samples


def meet_here(address):
    """Return `tcp://HOST:PORT` or `HOST`, with `localhost` instead of another machine's name."""
    is_url = "//" in address
    url = urlsplit(address if is_url else f"//{address}")
    host = url.hostname or address  # there is none in an error message, if $(scontrol …) failed
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=family):
        return address  # a server can be created there, so it is this machine
    report(events.OtherMachine, host=host)
    return url._replace(netloc=f"localhost:{url.port}").geturl() if is_url else "localhost"


@patch(f"{C10D}.init_process_group")
def init_process_group(original, *args, **kwargs):
    """Report that the process joins the group, and let the ranks meet on this machine."""
    call = inspect.signature(original).bind(*args, **kwargs)
    method = call.arguments.get("init_method") or ""
    if method.startswith("tcp://"):
        call.arguments["init_method"] = meet_here(method)
    elif "MASTER_ADDR" in os.environ:
        os.environ["MASTER_ADDR"] = meet_here(os.environ["MASTER_ADDR"])
    result = original(*call.args, **call.kwargs)
    state.rank = dist.get_rank()
    if not script_line(direct=True):  # a framework, which sees no GPU and calls no set_device
        state.gpu = int(os.environ.get("LOCAL_RANK", 0))
    report(events.Join, rank=state.rank)
    return result


# ---------------------------------------------------------------- collectives


def report_call(function, args, kwargs):
    """Report a collective before it is called, and return the tensors among its arguments."""
    named = inspect.signature(function).bind(*args, **kwargs).arguments
    tensors = tensors_in([*named.values()])
    outside_step = not depth_of_steps()  # inside a step, an optimizer may gather parameters
    requires_gradient = outside_step and any(tensor.requires_grad for tensor in tensors)
    report(
        events.Collective,
        name=function.__name__,
        in_model=state.in_forward or in_backward(),
        elements=max((tensor.numel() for tensor in tensors), default=0),
        requires_gradient=requires_gradient,
        # No collective of torch.distributed returns a gradient. If gradients are disabled, that is
        # intended, or an autograd function (torch.distributed.nn) calls it, which returns one.
        cuts_gradient=requires_gradient and torch.is_grad_enabled(),
    )
    return tensors


def report_numbers(tensor):
    """Report the whole numbers that the ranks have reduced, which may be counts of samples.

    Their sum is reported, too, because there may be a count for each class.
    """
    if tensor.numel() <= MAX_COUNTS:
        numbers = ask(lambda: [*tensor.flatten().tolist(), tensor.sum().item()], default=[])
        whole = [int(number) for number in numbers if ask(lambda value: value % 1 == 0, number)]
        report(events.Totalled, values=whole)


def is_on_all_ranks(args, kwargs):
    """Return whether the group of a collective, if one is passed, contains all ranks."""
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    return all(group.size() == dist.get_world_size() for group in groups)


@patch(*(f"{C10D}.{name}" for name in distributed_c10d.__all__ if re.match(COLLECTIVE, name)))
def collective(original, *args, **kwargs):
    """Report a collective before it is called, because it may hang, and then what it returned."""
    # Calls inside a collective do not count: all_gather_object calls all_gather. Neither do calls
    # of other threads, because their order is not fixed.
    if state.in_collective or threading.current_thread() is not threading.main_thread():
        return original(*args, **kwargs)
    state.in_collective = True
    tensors = []
    try:
        with harmless():
            if script_line() and is_on_all_ranks(args, kwargs):
                tensors = report_call(original, args, kwargs)
        # Unlike NCCL, gloo refuses gradients in all_gather_into_tensor and all_gather_single.
        drop_gradient = TASK.translate and "gather_" in original.__name__
        with torch.set_grad_enabled(torch.is_grad_enabled() and not drop_gradient):
            result = original(*args, **kwargs)
    finally:
        state.in_collective = False
    with harmless():  # an asynchronous call returns a Work, and has no result yet
        if original.__name__ in REDUCTIONS and tensors and not isinstance(result, dist.Work):
            report_numbers(tensors[0])
    return result
