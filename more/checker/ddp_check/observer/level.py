"""For the drill world-size, removes from a run what may differ between N processes and one.

Dropout drops nothing, BatchNorm uses the statistics of all ranks, the random numbers of a sample
depend only on its index, and everything is computed in float64. Random numbers that a line of the
script draws cannot be made equal, so that line is reported. SyncBatchNorm works on the CPU in any
run whose GPU calls are translated.
"""

import random
import re
import sys
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import optimizer
from torch.utils import data

from ddp_check.events import LineDrew
from ddp_check.observer.base import TASK, ask, in_backward, report, script_line, state
from ddp_check.observer.data import checksum_of_states
from ddp_check.observer.patches import patch
from ddp_check.observer.steps import generator_states
from ddp_check.protocol import STEPS, is_own

# Names such as dropout2d and alpha_dropout, without in-place functions, which end in "_".
DROPOUTS = [name for name in dir(nn.functional) if re.search(r"dropout(\dd)?$", name)]
plain_forward = _BatchNorm.forward  # the original, which is patched below

# ---------------------------------------------------------------- BatchNorm


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group. Its gradient is the sum over their losses."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        result = tensor.contiguous().clone()
        group.allreduce([result]).wait()  # not dist.all_reduce, which is patched
        return result

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient, ctx.group), None


def normalize_over_ranks(forward, layer, tensor):
    """Normalize this rank's samples together with those of the other ranks, as one batch."""
    if not (layer.training and dist.is_initialized()):
        return forward(layer, tensor)
    group = getattr(layer, "process_group", None) or dist.group.WORLD
    rank, sizes = group.rank(), torch.zeros(group.size(), dtype=torch.int)
    sizes[rank] = len(tensor)
    sizes = SumOverRanks.apply(sizes, group).tolist()
    before, after = sum(sizes[:rank]), sum(sizes[rank + 1 :])
    # Each rank fills its place in a batch of zeros: a a 0 0 0 and 0 0 b b b add up to a a b b b.
    # pad() gets the widths of the last dimension first, and the samples are the first dimension.
    padded = nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [before, after])
    batch = SumOverRanks.apply(padded, group)
    return forward(layer, batch)[before : before + len(tensor)]


@patch("torch.nn.SyncBatchNorm.forward")
def forward_synced(original, self, tensor):
    """Normalize over all ranks on the CPU, too, where PyTorch's SyncBatchNorm cannot."""
    return normalize_over_ranks(plain_forward, self, tensor)


if TASK.scale:
    torch.set_default_dtype(torch.float64)  # for tensors of the script, such as class weights

    @patch("torch.nn.modules.batchnorm._BatchNorm.forward")
    def forward(original, self, tensor):
        """Normalize over all ranks in a wrapped model; elsewhere, other ranks may not take part."""
        if state.in_forward or in_backward():
            return normalize_over_ranks(original, self, tensor)
        return original(self, tensor)

    # ------------------------------------------------------------ dropout and lower precision

    @patch(*(f"torch.nn.functional.{name}" for name in DROPOUTS))
    def drop_nothing(original, input, *_, **__):
        """Return the input of a dropout unchanged."""
        return input

    @patch("torch.nn.functional.scaled_dot_product_attention")
    def attend_to_all(original, *args, dropout_p=0.0, **kwargs):
        """Drop nothing from attention, whose fifth argument is the share that is dropped."""
        return original(*args[:4], *([0.0] if args[4:] else []), *args[5:], **kwargs)

    @patch("torch.nn.RNNBase.__init__")
    def make_recurrent(original, self, *args, **kwargs):
        """Drop nothing between the layers of a recurrent network."""
        original(self, *args, **kwargs)
        self.dropout = 0.0

    @patch("torch.autocast.__init__")
    def autocast(original, self, device_type, *args, **kwargs):
        """Keep float64 where the script would use a lower precision."""
        original(self, device_type, enabled=False)

    # ------------------------------------------------------------ random samples

    class SeededByIndex(data.Dataset):
        """A data set whose random samples do not depend on which rank asks for them."""

        def __init__(self, dataset):
            self._ddp_check_inner = dataset

        def __getitem__(self, index):
            numpy = sys.modules.get("numpy.random")
            # Restored below, so that `fetch` in data.py sees only what the collate function draws:
            before = torch.get_rng_state(), random.getstate(), numpy and numpy.get_state()
            trace = sys.gettrace()
            sys.settrace(None)  # these random numbers are made equal, so no line is reported
            seed = zlib.crc32(repr(index).encode())
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.seed(seed)
            try:
                return self._ddp_check_inner[index]
            finally:
                torch.set_rng_state(before[0])
                random.setstate(before[1])
                if numpy:
                    numpy.set_state(before[2])
                sys.settrace(trace)

    @patch("torch.utils.data._utils.fetch._MapDatasetFetcher.__init__")
    def make_fetcher(original, self, dataset, *args):
        """Let the random numbers of a sample depend only on its index."""
        original(self, SeededByIndex(dataset), *args)

    # ------------------------------------------------------------ random lines

    def states_at(frame):
        """Return the states of all global generators, and of those that a function names, by id."""
        named = {**frame.f_globals, **frame.f_locals}
        named.update(ask(vars, named.get("self"), default={}))
        own = [value for value in named.values() if issubclass(type(value), torch._C.Generator)]
        return generator_states() | {str(id(one)): checksum_of_states([one]) for one in own}

    class Tracer:
        """Reports the lines of the script that use a generator. Python calls it at each line."""

        def __init__(self):
            self.line, self.states = script_line(), generator_states()

        def __call__(self, frame, event, _):
            if not is_own(frame.f_code.co_filename):
                return None  # a library's lines count as the line of the script that called it
            states = states_at(frame)
            for source in states:  # Python calls this before a line, so the line before drew
                if states[source] != self.states.get(source, states[source]):
                    report(LineDrew, where=self.line, source=source)
            self.states |= states
            # When a function returns, the line that called it continues.
            self.line = script_line(frame=frame.f_back if event == "return" else frame)
            return self

    @optimizer.register_optimizer_step_pre_hook
    def trace_lines(*_):
        """Trace the lines of the script between the first steps."""
        if state.steps == 1:
            tracer, frame = Tracer(), sys._getframe(1)
            sys.settrace(tracer)
            while frame:  # also trace the functions that are already running
                frame.f_trace, frame = tracer, frame.f_back
        elif state.steps == STEPS:
            sys.settrace(None)
