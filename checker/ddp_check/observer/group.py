"""Observes the process group, its collectives, and what becomes of what they gather."""

import contextlib
import inspect
import os
import socket
import sys
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_check import events
from ddp_check.observer.base import TASK, ask, harmless, is_first, report, script_line, state
from ddp_check.observer.patches import C10D, COLLECTIVES, patch
from ddp_check.observer.values import checksum, tensors_in

REDUCTIONS = ("all_reduce", "reduce")
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
MAX_COUNTS = 64  # numbers that are added up at once, among which may be that of the samples
TO_ONE_NUMBER = ("sum", "mean")
READ_OUT = ("__eq__", "eq", "__ne__", "ne", "numpy", "tolist", *TO_ONE_NUMBER)

# ---------------------------------------------------------------- process group


def meet_here(address):
    """Replace the host in `tcp://HOST:PORT` or `HOST` if it is another machine's."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    host = parts.hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=family):
        return address
    report(events.OtherMachine, host=host)
    here = parts._replace(netloc=f"localhost:{parts.port}")
    return here.geturl() if parts.scheme else "localhost"


@patch(f"{C10D}.init_process_group")
def init_process_group(original, *args, **kwargs):
    """Report that the process joins the group, on this machine wherever it is told to meet."""
    nn_imported_before = "torch.distributed.nn" in sys.modules
    call = inspect.signature(original).bind(*args, **kwargs)
    method = call.arguments.get("init_method") or ""
    if method.startswith("tcp://"):
        call.arguments["init_method"] = meet_here(method)
    elif "MASTER_ADDR" in os.environ:
        os.environ["MASTER_ADDR"] = meet_here(os.environ["MASTER_ADDR"])
    result = original(*call.args, **call.kwargs)
    state.rank = dist.get_rank()
    by_script = bool(script_line(direct=True))
    if not by_script:  # a framework has set the GPU before
        state.gpu = int(os.environ.get("LOCAL_RANK", 0))
    port = urlsplit(method).port or os.environ.get("MASTER_PORT")
    report(
        events.Join,
        rank=state.rank,
        port=port,
        nn_imported_before=nn_imported_before,
        by_script=by_script,
    )
    return result


# ---------------------------------------------------------------- collectives


class Call:
    """A collective that the script, or a library on its behalf, calls on all ranks."""

    def __init__(self, name, args, kwargs):
        arguments = [*args, *kwargs.values()]
        self.name = name
        self.line = script_line()
        # The list that a gather fills, which is its first argument:
        self.parts = args[0] if args and isinstance(args[0], list) else []
        self.tensors = tensors_in(arguments)
        operations = [value for value in arguments if isinstance(value, dist.ReduceOp)]
        self.sums = name in REDUCTIONS and all(operation in SUMS for operation in operations)
        self.elements = max((tensor.numel() for tensor in self.tensors), default=0)
        requires_grad = any(tensor.requires_grad for tensor in self.tensors)
        self.cuts_gradient = torch.is_grad_enabled() and requires_grad
        self.in_model = state.in_forward or torch._C._current_graph_task_id() >= 0
        self.own = number_in(self.tensors) if self.sums else None

    def announce(self):
        """Report the call before it is made."""
        if self.sums and self.elements > 1 and not (state.in_forward or state.in_step):
            state.since_step.reduced.append((checksum(self.tensors), self.elements))
        report(
            events.Collective,
            where=self.line,
            name=self.name,
            sums=self.sums,
            in_model=self.in_model,
            elements=self.elements,
            cuts_gradient=self.cuts_gradient,
        )

    def look_at(self, result):
        """Look at what the call has changed."""
        if self.sums and self.cuts_gradient:
            for tensor in self.tensors:
                notice_gradient_through(tensor, self)
        if self.name in REDUCTIONS and not isinstance(result, dist.Work):
            report_totals(self)
        if "gather" in self.name:
            loses_gradient = self.cuts_gradient and self.name == "all_gather"
            after_gather.start(tensors_in(self.parts), self.line if loses_gradient else "")


def is_on_all_ranks(args, kwargs):
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    return all(group.size() == dist.get_world_size() for group in groups)


def number_in(tensors):
    """Return the value of the only tensor, if that is a single number."""
    single = len(tensors) == 1 and tensors[0].numel() == 1
    return ask(lambda: float(tensors[0].detach())) if single else None


@patch(*COLLECTIVES)
def collective(original, *args, **kwargs):
    """Report a collective before it is called, as it may hang, and what it gave afterwards."""
    if state.in_collective:  # all_gather_object calls all_gather
        return original(*args, **kwargs)
    state.in_collective += 1
    call = None
    try:
        with harmless:
            if script_line() and is_on_all_ranks(args, kwargs):
                call = Call(original.__name__, args, kwargs)
                call.announce()
        # gloo refuses a tensor with a gradient in all_gather_into_tensor, and NCCL does not.
        drop_gradient = TASK.translate and "gather_" in original.__name__
        with torch.set_grad_enabled(torch.is_grad_enabled() and not drop_gradient):
            result = original(*args, **kwargs)
    finally:
        state.in_collective -= 1
    if call:
        with harmless:
            call.look_at(result)
    return result


def report_totals(call):
    """Report the whole numbers that were added up, and their sum: a number of samples is one."""
    for tensor in call.tensors:
        if tensor.numel() > MAX_COUNTS and tensor.is_floating_point():
            continue
        numbers = ask(lambda t: [*t.flatten()[:MAX_COUNTS].tolist(), t.sum().item()], tensor) or []
        whole = [int(value) for value in numbers if ask(lambda value: value % 1 == 0, value)]
        report(events.Totalled, values=whole, own=call.own, total=number_in(call.tensors))


def notice_gradient_through(tensor, call):
    """Report it if a backward pass goes through a tensor that was summed up in place."""

    def through(_):
        with harmless:
            report(events.ReducedInPlace, call.line, elements=tensor.numel())

    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(through)


# ---------------------------------------------------------------- after a gather


class AfterGather(TorchFunctionMode):
    """Watches what becomes of what was gathered, from one gather to the next step.

    It reports how long tensors are, for a script cuts off what a sampler has padded, and a backward
    pass that would have to go on in what other ranks gave. It does not touch the script's tensors.
    """

    parts = None  # what the ranks gave, while it is of interest
    line = ""  # of a gather that has lost a gradient
    ranks = WeakTensorKeyDictionary()  # a tensor made of those parts alone -> whose parts

    def start(self, parts, line=""):
        """Watch from now on, unless the script has entered a mode of its own."""
        self.pause()
        self.parts, self.line = parts, line
        self.ranks.clear()
        if line:
            self.ranks.update({part: {rank} for rank, part in enumerate(parts)})
        self.resume()

    def pause(self):
        """Watch nothing while a batch is loaded and used, which costs time."""
        while _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def resume(self):
        """Go on watching."""
        current = _get_current_function_mode()
        others = current is not None and not type(current).__module__.startswith("ddp_check.")
        if self.parts is not None and current is not self and not others:
            self.__enter__()

    def stop(self):
        """Watch nothing until the next gather: a step has been taken."""
        self.parts = None
        self.pause()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.parts is not None:
            with harmless:
                name = getattr(func, "__name__", "")
                self.look_at_length(name, args, result)
                if len(self.ranks) and torch.is_grad_enabled() and name != "detach":
                    self.look_at_gradient([args, kwargs], result)
        return result

    def look_at_length(self, name, args, result):
        """Report a cut, and the length of what is compared or read."""
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return
        length = len(tensor)
        if name == "__getitem__" and isinstance(args[1], slice) and len(result) < length:
            dropped = length - len(result)
            report(events.Cut, dropped=dropped, order=order_of(tensor, self.parts))
        elif name in READ_OUT and length > 1:
            report(events.Counted, length=length, reduced=name in TO_ONE_NUMBER)

    def look_at_gradient(self, arguments, result):
        """Follow what is made of the parts, until it meets a tensor that has a gradient."""
        ranks = set()
        for tensor in tensors_in(arguments):
            own = {dist.get_rank()} if tensor.requires_grad else set()  # written into it since
            ranks |= self.ranks.get(tensor, set()) - own
        for tensor in tensors_in(result) if ranks else ():
            if tensor.requires_grad:
                report_gradient_lost(tensor, self.line, dist.get_rank() in ranks)
            else:
                self.ranks[tensor] = ranks


after_gather = AfterGather()


def report_gradient_lost(tensor, line, own_part):
    """Report it if a backward pass goes through a tensor, and not on to what was gathered."""

    def through(_):
        with harmless:
            if is_first("gradient lost", line, own_part):
                report(events.GradientLost, line, own_part=own_part)

    if not tensor.is_leaf:
        tensor.register_hook(through)


def order_of(tensor, parts):
    """Return how a tensor holds the parts that the ranks gave: in "blocks" or "another" order.

    It is "" if it holds them in turns, as DistributedSampler deals, or if that is not known.
    """
    if len({part.shape for part in parts}) != 1 or not parts[0].dim():
        return ""
    blocks = torch.cat(parts)
    turns = torch.stack(parts, dim=1).flatten(0, 1)
    if tensor.shape != blocks.shape or tensor.equal(turns):
        return ""
    if not tensor.flatten().sort().values.equal(blocks.flatten().sort().values):
        return ""
    return "blocks" if tensor.equal(blocks) else "another"
