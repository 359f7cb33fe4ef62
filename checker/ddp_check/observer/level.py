"""What the drill world-size leaves out of a run: chance, and what a rank's own batch decides."""

import random

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import data

from ddp_check.observer.base import TASK
from ddp_check.observer.patches import patch

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
plain_forward = _BatchNorm.forward


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group. The losses of all of them depend on it."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        result = tensor.contiguous().clone()
        group.allreduce([result]).wait()  # not by a function that is patched
        return result

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient, ctx.group), None


def normalize_over_ranks(forward, self, tensor):
    """Normalize this rank's samples together with those of the others, as one batch."""
    if not (self.training and dist.is_initialized()):
        return forward(self, tensor)
    group = getattr(self, "process_group", None) or dist.group.WORLD
    rank, sizes = group.rank(), torch.zeros(group.size(), dtype=torch.int)
    sizes[rank] = len(tensor)
    sizes = SumOverRanks.apply(sizes, group).tolist()
    before, after = sum(sizes[:rank]), sum(sizes[rank + 1 :])
    # Each rank fills its place in a batch of zeros: a a 0 0 0 and 0 0 b b b add up to a a b b b.
    # What pad() gets begins with the last dimension, and the first is that of the samples.
    padded = torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [before, after])
    batch = SumOverRanks.apply(padded, group)
    return forward(self, batch)[before : before + len(tensor)]


@patch("torch.nn.SyncBatchNorm.forward")
def forward_synced(original, self, tensor):
    """Normalize over all ranks on the CPU, too."""
    return normalize_over_ranks(plain_forward, self, tensor)


if TASK.scale:

    @patch(*(f"torch.nn.functional.{name}" for name in DROPOUTS))
    def keep_all(original, input, *_, **__):
        """Drop nothing out."""
        return input

    @patch("torch.nn.functional.scaled_dot_product_attention")
    def attend_to_all(original, *args, dropout_p=0.0, **kwargs):
        """Drop nothing out of an attention."""
        return original(*args[:4], **kwargs)

    @patch("torch.nn.modules.batchnorm._BatchNorm.forward")
    def forward(original, self, tensor):
        """Normalize over the batches of all ranks, as one process would."""
        return normalize_over_ranks(original, self, tensor)

    class Seeded(data.Dataset):
        """A data set whose samples are random in the same way on whatever rank."""

        def __init__(self, dataset):
            self.dataset = dataset

        def __getitem__(self, index):
            states = torch.get_rng_state(), random.getstate()
            torch.manual_seed(index), random.seed(index)
            try:
                return self.dataset[index]
            finally:
                torch.set_rng_state(states[0]), random.setstate(states[1])

    @patch("torch.utils.data._utils.fetch._MapDatasetFetcher.__init__")
    def seed_samples(original, self, dataset, *args):
        """Let chance depend on the index of a sample alone."""
        original(self, Seeded(dataset), *args)
