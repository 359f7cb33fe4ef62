"""Observes the process group and its collectives."""

import contextlib
import os
import re
import socket
import sys
import time
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_check.observer.models import describe_models
from ddp_check.observer.report import called_by_script, say, seen, watch, where

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
    say("foreign", host=host, where=where())
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
    own = called_by_script()
    say("init", rank=dist.get_rank(), port=port, nn=early, own=own, where=where())
    return result


@watch(c10d, "destroy_process_group")
def destroy_process_group(do, *args, **kwargs):
    describe_models()
    say("destroy", where=where())
    time.sleep(0.05)  # gloo's threads forget their last work, or freeing a DDP model could hang
    return do(*args, **kwargs)


def is_of_all(arguments):
    """Return whether a collective with these arguments involves all ranks."""
    groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
    return all(group is dist.group.WORLD for group in groups)


def watch_slices():
    """Until the next batch, report slices: a script drops a sampler's padding after a gather."""
    if seen.slicing:
        return
    do, sizes = torch.Tensor.__getitem__, set()

    def slice_(tensor, key):
        part = do(tensor, key)
        dropped = len(tensor) - len(part) if isinstance(key, slice) else 0
        if dropped and dropped not in sizes:
            sizes.add(dropped)
            say("slice", dropped=dropped)
        return part

    seen.slicing, torch.Tensor.__getitem__ = do, slice_


def sums(name, arguments):
    """Return whether a collective adds numbers up: (all_)reduce without another operation."""
    ops = [value for value in arguments if isinstance(value, dist.ReduceOp)]
    return name in ("all_reduce", "reduce") and all(
        op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) for op in ops
    )


def watch_collective(name):
    @watch(c10d, name)
    def collective(do, *args, **kwargs):
        inner = seen.in_collective  # all_gather_object calls all_gather
        if not inner and is_of_all([*args, *kwargs.values()]):
            line = where()
            if line:  # called by the script, or by a library on its behalf
                adds = sums(name, [*args, *kwargs.values()])
                say("collective", name=name, adds=adds, where=line)
                if "gather" in name:
                    watch_slices()
        seen.in_collective += 1
        try:
            return do(*args, **kwargs)
        finally:
            seen.in_collective -= 1


for name in COLLECTIVES:
    watch_collective(name)
for name in (*COLLECTIVES, "init_process_group", "destroy_process_group"):
    setattr(dist, name, getattr(c10d, name))
