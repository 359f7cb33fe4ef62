"""Observes the process group, its collectives, and what becomes of what they gather."""

import contextlib
import inspect
import os
import re
import socket
import sys
import threading
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_check import events
from ddp_check.observer.base import (
    TASK,
    ask,
    depth_of_steps,
    harmless,
    in_backward,
    is_first,
    is_recorded,
    report,
    script_line,
    state,
)
from ddp_check.observer.patches import C10D, patch
from ddp_check.observer.values import checksum, tensors_in

COLLECTIVE = "all_|reduce(?!_op)|broadcast|gather|scatter|barrier|monitored_barrier"
REDUCTIONS = ("all_reduce", "reduce")
LISTS_OF_PARTS = ("tensor_list", "gather_list", "object_list", "object_gather_list")
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
TIMES_GROWN = 2  # in a row, after which a sum counts as kept: once may be chance
FEW = 8  # numbers, that each may be printed
MAX_COUNTS = 64  # numbers that are added up at once, among which may be that of the samples
TO_ONE_NUMBER = ("sum", "mean")
HARMLESS_MODES = ("ddp_check.", "torch.utils._device")  # modules; torch.set_default_device's
EQUALS = ("__eq__", "eq")
COMPARISONS = (*EQUALS, "__sub__", "sub", "l1_loss", "mse_loss", "smooth_l1_loss")
NEAR = 0.25  # standard deviations of what is expected: two numbers that are as near count as equal
latest_sums = WeakTensorKeyDictionary()  # tensor that was added up -> its `times_grown`, the sum
CONVERSIONS = ("numpy", "tolist", "__array__")
READ_OUT = (*EQUALS, "__ne__", "ne", *CONVERSIONS, *TO_ONE_NUMBER)


def meet_here(address):
    """Return `tcp://HOST:PORT` or `HOST` with `localhost` for the host of another machine."""
    is_url = "//" in address
    url = urlsplit(address if is_url else f"//{address}")
    host = url.hostname or address  # not a host: the error of a command, perhaps
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=family):
        return address  # a server can be created there, so it is this machine
    report(events.OtherMachine, host=host)
    return url._replace(netloc=f"localhost:{url.port}").geturl() if is_url else "localhost"


@patch(f"{C10D}.init_process_group")
def init_process_group(original, *args, **kwargs):
    """Report that the process joins the group, and let it meet the others on this machine."""
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
    if not by_script:  # a framework has called set_device, of which no event tells
        state.gpu = int(os.environ.get("LOCAL_RANK", 0))
    report(
        events.Join,
        rank=state.rank,
        port=urlsplit(method).port or os.environ.get("MASTER_PORT"),
        nn_imported_before=nn_imported_before,
        by_script=by_script,
    )
    return result


# ---------------------------------------------------------------- collectives


class Call:
    """A collective that the script, or a library on its behalf, calls on all ranks.

    It is made before the collective is called, which overwrites what this rank gives.
    """

    def __init__(self, function, args, kwargs):
        self.name, self.line = function.__name__, script_line()
        named = inspect.signature(function).bind(*args, **kwargs).arguments
        arguments = [*named.values()]
        self.tensors = tensors_in(arguments)  # what it is given, and what it fills
        self.parts = parts_in(named)  # of the ranks, in a gather
        operations = [value for value in arguments if isinstance(value, dist.ReduceOp)]
        self.sums = self.name in REDUCTIONS and all(each in SUMS for each in operations)
        self.own_numbers = few_numbers(self.tensors) if self.sums else []  # what this rank adds
        averages = dist.ReduceOp.AVG in operations  # to do that again changes nothing
        # dist.reduce() leaves a sum on one rank only.
        may_grow = self.name == "all_reduce" and self.sums and not averages
        self.times_grown = times_grown(self.tensors[0]) if may_grow else None
        # These two are fields of `Collective`:
        outside_step = not depth_of_steps()  # in which an optimizer may gather the parameters
        self.requires_gradient = outside_step and any(
            tensor.requires_grad for tensor in self.tensors
        )
        self.cuts_gradient = self.requires_gradient and torch.is_grad_enabled()

    def announce(self):
        """Report the call before it is made."""
        elements = max((tensor.numel() for tensor in self.tensors), default=0)
        if self.sums and elements > 1 and not (state.in_forward or depth_of_steps()):
            state.since_step.added_up.append((checksum(self.tensors), elements))
        report(
            events.Collective,
            where=self.line,
            name=self.name,
            sums=self.sums,
            in_model=state.in_forward or in_backward(),
            elements=elements,
            of_small_gradient=elements <= MAX_COUNTS and any(map(is_gradient, self.tensors)),
            requires_gradient=self.requires_gradient,
            cuts_gradient=self.cuts_gradient,
        )

    def report_result(self, result):
        """Report what the call has given, as far as it is of interest."""
        if self.sums and self.cuts_gradient:
            for tensor in self.tensors:  # summed up in place: does a backward pass go through it?
                elements = tensor.numel()
                report_in_backward(tensor, events.ReducedInPlace, self.line, elements=elements)
        if "gather" in self.name:
            self.watch_parts()
        if isinstance(result, dist.Work):
            return  # it is not done yet
        if self.name in REDUCTIONS:
            self.report_numbers(self.tensors[0])
            self.keep_sum(self.tensors[0])
        elif self.name == "all_gather":
            self.report_numbers(ask(sum, tensors_in(self.parts)))

    def watch_parts(self):
        """Begin to watch what becomes of the parts that the ranks gave: tensors, or numbers."""
        parts = tensors_in(self.parts)
        places = [part.data_ptr() for part in parts if part.numel()]
        if len(set(places)) < len(places):
            report(events.PartsOverwritten, self.line)
        numbers = ask(lambda: [*map(torch.as_tensor, self.parts)], default=[])
        loses_gradient = self.cuts_gradient and self.name == "all_gather"
        lost_gradients = LostGradients(parts, self.line) if loses_gradient else None
        after_gather.start(parts or numbers, lost_gradients)

    def keep_sum(self, tensor):
        """Keep the result, to see whether it is still in the tensor when that is added up again."""
        if self.times_grown is not None:
            latest_sums[tensor] = (self.times_grown, tensor.detach().clone())
        if self.times_grown == TIMES_GROWN:
            report(events.SumKept, self.line)

    def report_numbers(self, tensor):
        """Report what the ranks gave together: numbers of samples, or a single one like a loss."""
        if not isinstance(tensor, torch.Tensor):
            return  # parts of different lengths have no sum
        if tensor.numel() > MAX_COUNTS and tensor.is_floating_point():
            return
        numbers = ask(lambda: [*tensor.flatten()[:MAX_COUNTS].tolist(), tensor.sum().item()])
        whole = [int(value) for value in numbers or () if ask(lambda value: value % 1 == 0, value)]
        total = few_numbers(self.tensors) if self.own_numbers else []
        report(events.Totalled, values=whole, own=self.own_numbers, total=total)


def is_gradient(tensor):
    """Return whether a tensor is the gradient of a parameter that an optimizer has."""
    return any(tensor is value.grad for value in state.parameters.values())


def times_grown(tensor):
    """Return how often in a row a tensor is added up with its last result still in it.

    That is inferred: no element is smaller than the last result, none of which is negative, and one
    is larger. It is None for a large tensor or a gradient, which are not watched.
    """
    if tensor.numel() > MAX_COUNTS or is_gradient(tensor):
        return None
    times, latest = latest_sums.get(tensor, (0, None))
    if latest is None or (latest < 0).any() or (tensor < latest).any():
        return 0
    return times + 1 if (tensor > latest).any() else 0


def parts_in(arguments):
    """Return what a gather fills with the parts of the ranks: the items of a list, or views."""
    if "output_tensor" in arguments:
        shape = dist.get_world_size(), *arguments["input_tensor"].shape
        # Two parts of 3 numbers lie one behind another, in an output of shape (2, 3) or (6,).
        return [*arguments["output_tensor"].detach().view(shape)]
    return next((arguments[name] for name in LISTS_OF_PARTS if arguments.get(name)), [])


def few_numbers(tensors):
    """Return the values of the only tensor, if they are few."""
    if len(tensors) != 1 or tensors[0].numel() > FEW:
        return []
    return ask(lambda: [*map(float, tensors[0].detach().flatten().tolist())], default=[])


def is_on_all_ranks(args, kwargs):
    """Return whether the group of a collective, if it is given one, has all ranks."""
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    return all(group.size() == dist.get_world_size() for group in groups)


def report_in_backward(tensor, kind, line, **values):
    """Report an event if a backward pass goes through this tensor. At a leaf, it ends."""

    def report_once(_):
        if is_first(kind, line, *values.values()):
            report(kind, line, **values)

    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(report_once)


@patch(*(f"{C10D}.{name}" for name in distributed_c10d.__all__ if re.match(COLLECTIVE, name)))
def collective(original, *args, **kwargs):
    """Report a collective before it is called, as it may hang, and what it gave afterwards."""
    # all_gather_object calls all_gather. The calls of another thread have no order among those of
    # this one.
    if state.in_collective or threading.current_thread() is not threading.main_thread():
        return original(*args, **kwargs)
    state.in_collective = True
    call = None
    try:
        with harmless():
            if script_line() and is_on_all_ranks(args, kwargs):
                call = Call(original, args, kwargs)
                call.announce()
        # gloo refuses gradients in all_gather_into_tensor and all_gather_single, NCCL does not.
        drop_gradient = TASK.translate and "gather_" in original.__name__
        with torch.set_grad_enabled(torch.is_grad_enabled() and not drop_gradient):
            result = original(*args, **kwargs)
    finally:
        state.in_collective = False
    if call:
        with harmless():
            call.report_result(result)
    return result


# ---------------------------------------------------------------- after a gather


class AfterGather(TorchFunctionMode):
    """Watches what becomes of what was gathered. It does not change the script's tensors.

    It reports how long tensors are, for a script cuts off what a sampler has padded, and tells
    `LostGradients`. While batches are loaded and used, it is not entered, which would cost time:

        gather     batch                     end of the pass     step, or the next pass
        start() -> pause() ----------------> resume() ---------> stop()
    """

    parts = None  # what the ranks gave; None: nothing is of interest
    in_rank_order = False  # they were concatenated, rank 0's first
    lost_gradients = None  # of these parts, as `LostGradients`

    def start(self, parts, lost_gradients):
        """Watch what becomes of these parts."""
        self.pause()
        self.parts, self.lost_gradients = parts, lost_gradients
        self.resume()

    def pause(self):
        """Leave the mode."""
        while _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def resume(self):
        """Enter the mode, unless in one of the script's, whose end takes away the one on top."""
        current = _get_current_function_mode()
        is_free = current is None or type(current).__module__.startswith(HARMLESS_MODES)
        if self.parts is not None and current is not self and is_free:
            self.__enter__()

    def stop(self):
        """Watch nothing until the next gather."""
        self.parts, self.in_rank_order = None, False
        self.pause()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.parts is not None and not is_recorded():
            with harmless():
                self.look_at(getattr(func, "__name__", ""), args, kwargs, result)
        return result

    def look_at(self, name, args, kwargs, result):
        """Report what is of interest in a call of PyTorch, which is over."""
        length = ask(len, args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if length is not None:  # a single number, or a lazy parameter, has none
            self.report_cut(name, args, length, result)
            self.report_read(name, args, length)
        if name in ("cat", "concat") and not self.in_rank_order:
            self.in_rank_order = bool(ask(lambda: args[0][0].equal(self.parts[0])))
        if name == "cross_entropy" and self.in_rank_order and len(args) > 1:
            self.report_targets(*args[:2])
        lost = self.lost_gradients
        if lost and lost.ranks_of and torch.is_grad_enabled() and name != "detach":
            lost.follow([args, kwargs], result)

    def report_targets(self, outputs, targets):
        """Report targets that are right on rank 0 alone.

        Its 2 samples are numbers 0 and 1 among those of all ranks, those of rank 1 are 2 and 3.
        """
        rank, total = dist.get_rank(), sum(map(len, self.parts))
        is_contrastive = outputs.shape == (len(self.parts[rank]), total)
        if rank and is_contrastive and targets.tolist() == [*range(len(outputs))]:
            report(events.TargetsOfRank0)

    def report_cut(self, name, args, length, result):
        """Report that the end of a tensor is cut off."""
        if name == "__getitem__" and isinstance(args[1], slice) and len(result) < length:
            in_blocks = self.holds_blocks(args[0])
            report(events.Cut, dropped=length - len(result), in_blocks=in_blocks)

    def holds_blocks(self, tensor):
        """Return whether a tensor has one rank's part behind another's."""
        return in_turns_if_in_blocks(tensor, self.parts) is not None

    def report_read(self, name, args, length):
        """Report the length of a tensor that is compared, or read by other means."""
        equal, equal_in_turns = None, None
        if name in COMPARISONS and ask(lambda: args[1].shape) == args[0].shape:
            equal, equal_in_turns = self.count_equal(*args[:2])
        if length < 2 or (equal is None and name not in READ_OUT):
            return
        report(
            events.Counted,
            length=length,
            reduced=name in TO_ONE_NUMBER,
            in_blocks=name in CONVERSIONS and self.holds_blocks(args[0]),
            equal=equal,
            equal_in_turns=equal_in_turns,
        )

    def count_equal(self, tensor, other):
        """Return how many numbers are equal, and how many would be if the ranks took turns.

        That is None unless one of these tensors has one rank's part behind another's.
        """
        for gathered, expected in ((tensor, other), (other, tensor)):
            turns = in_turns_if_in_blocks(gathered, self.parts)
            if turns is not None:
                return count_near(gathered, expected), count_near(turns, expected)
        return None, None


class LostGradients:
    """Follows the parts that an all_gather has returned, without a gradient, in a training step.

    If what is made of them has a gradient, that comes from another tensor: a backward pass reaches
    that one, and none of the parts. On rank 0 of 2, with what `ranks_of` says of each result:

        dist.all_gather(parts, mine)  # {0} and {1}
        both = torch.cat(parts)       # {0, 1}
        (both @ weight).sum()         # has the gradient of the weight: {0, 1} have lost theirs

    If the script first puts its own part in its place again, only that of the others is lost:

        parts[0] = mine               # which has a gradient, and is in no `ranks_of`; or
        parts[0].copy_(mine)          # {0}, but with a gradient now
        both = torch.cat(parts)       # has the gradient of `mine`: {1} has lost its own
    """

    def __init__(self, parts, line):
        self.line = line  # of the all_gather
        self.ranks_of = WeakTensorKeyDictionary()  # tensor made of the parts alone -> whose parts
        self.ranks_of.update({part: {rank} for rank, part in enumerate(parts)})

    def follow(self, arguments, result):
        """Follow what a call has made of the parts, or report that it has lost their gradient."""
        ranks = set()  # at whose parts a backward pass would end
        for tensor in tensors_in(arguments):
            has_gradient_again = {dist.get_rank()} if tensor.requires_grad else set()
            ranks |= self.ranks_of.get(tensor, set()) - has_gradient_again
        if not ranks:
            return
        for tensor in tensors_in(result):
            if not tensor.is_floating_point():
                continue  # no gradient passes through an index or a mask
            if tensor.requires_grad:
                own_part = dist.get_rank() in ranks
                report_in_backward(tensor, events.GradientLost, self.line, own_part=own_part)
            else:
                self.ranks_of[tensor] = ranks


after_gather = AfterGather()


def count_near(tensor, expected):
    """Return how many numbers of a tensor are those that are expected, or near them."""
    expected = expected.double()
    return int(((tensor.double() - expected).abs() <= NEAR * expected.std()).sum())


def in_turns_if_in_blocks(tensor, parts):
    """Return what the ranks gave, taking turns, if a tensor has one rank's part behind another's.

    Two ranks to which DistributedSampler deals samples 0 to 5 give 0 2 4 and 1 3 5. If the tensor
    holds 0 2 4 1 3, its end being cut off, this returns 0 1 2 3 4. It is None if the tensor has
    another order, or if both are the same.
    """
    if not parts or not all(part.dim() for part in parts) or len(tensor) <= len(parts[0]):
        return None
    blocks = ask(torch.cat, parts)
    if blocks is None or blocks.dtype != tensor.dtype:
        return None
    places = torch.cat([torch.arange(len(part), device=blocks.device) for part in parts])
    turns = blocks[places.argsort(stable=True)]  # [0 1 2 0 1 2] -> [0 3 1 4 2 5]
    in_blocks, in_turns = (tensor.equal(order[: len(tensor)]) for order in (blocks, turns))
    return turns[: len(tensor)] if in_blocks and not in_turns else None
