"""What the observer replaces or uses in PyTorch, and what a report lacks without it.

All of these names exist in PyTorch 2.8, the oldest version that is promised, and in 2.13. A name
with an underscore is private, and the first to go. Importing this module observes nothing, so a
test asks each new version for them. If a function to replace is missing, the rest is still
observed, and the report says what it lacks.

Outside of PyTorch, the observer replaces `signal.signal`, `logging.StreamHandler.emit` and
`sys.stdout`, and listens to the audit events `open` and `os.rename`.
"""

import functools
import importlib
import re
from typing import NamedTuple

from torch.distributed import distributed_c10d

OLDEST = "2.8"  # version that is promised
_COLLECTIVE = "all_|reduce(?!_op)|broadcast|gather|scatter|barrier|monitored_barrier"
COLLECTIVES = [
    f"torch.distributed.distributed_c10d.{name}"
    for name in distributed_c10d.__all__
    if re.match(_COLLECTIVE, name)
]


class Patch(NamedTuple):
    name: str  # of the function or method, with its module
    lacks: str  # what a report lacks if PyTorch has no such function
    also: str = ""  # another module that has the same function


C10D = "torch.distributed.distributed_c10d"
DDP = "torch.nn.parallel.DistributedDataParallel"
ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
SCALER = "torch.amp.GradScaler"
RNG = "torch.random"
CLIP = "torch.nn.utils.clip_grad"

PATCHES = [
    # process group
    Patch(f"{C10D}.init_process_group", "the process group", "torch.distributed"),
    Patch(f"{C10D}.destroy_process_group", "how the group is left", "torch.distributed"),
    *(Patch(name, "a collective", "torch.distributed") for name in COLLECTIVES),
    Patch(f"{C10D}.recv", "waits for other ranks", "torch.distributed"),
    Patch(f"{C10D}.recv_object_list", "waits for other ranks", "torch.distributed"),
    # data
    Patch("torch.utils.data.DataLoader.__init__", "the batch of the drill world-size"),
    Patch(f"{ITERATOR}.__init__", "all passes over the data"),
    Patch(f"{ITERATOR}._reset", "passes with persistent workers"),
    Patch(f"{ITERATOR}._next_index", "which samples a batch has"),
    Patch(f"{ITERATOR}.__next__", "all batches"),
    Patch("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch", "random numbers in samples"),
    Patch("torch.utils.data.distributed.DistributedSampler.set_epoch", "calls of set_epoch"),
    # random numbers
    Patch(f"{RNG}.manual_seed", "who draws random numbers", "torch"),
    Patch(f"{RNG}.seed", "who draws random numbers", "torch"),
    Patch(f"{RNG}.set_rng_state", "who draws random numbers", "torch"),
    # models and optimizers
    Patch(f"{DDP}.__init__", "wrapped models"),
    Patch(f"{DDP}.forward", "calls of wrapped models"),
    Patch(f"{DDP}.register_comm_hook", "hooks that replace the mean of the gradients"),
    Patch("torch.autograd.backward", "losses and backward passes"),
    Patch(f"{SCALER}.scale", "losses that a GradScaler scales"),
    Patch(f"{SCALER}.unscale_", "clipping of scaled gradients"),
    Patch(f"{SCALER}.step", "steps that a GradScaler skips"),
    Patch(f"{CLIP}.clip_grad_norm_", "clipping", "torch.nn.utils"),
    Patch(f"{CLIP}.clip_grad_value_", "clipping", "torch.nn.utils"),
    Patch("torch.nn.Module.load_state_dict", "states that are loaded"),
    Patch("torch.optim.Optimizer.load_state_dict", "states that are loaded"),
    Patch("torch.optim.Optimizer.add_param_group", "whether gradients are a sum or a mean"),
    Patch("torch.optim.lr_scheduler.LRScheduler.step", "steps of schedulers"),
    Patch("torch.optim.lr_scheduler.ReduceLROnPlateau.step", "steps of schedulers"),
    # files
    Patch("torch.save", "files that are saved"),
    Patch("torch.load", "files that are loaded"),
    Patch("torch.distributed.checkpoint.save", "sharded checkpoints"),
    Patch("torch.distributed.checkpoint.async_save", "sharded checkpoints"),
    Patch("torch.distributed.checkpoint.load", "sharded checkpoints"),
    # GPU calls that are translated for the CPU
    Patch("torch.amp.GradScaler.__init__", "GradScaler on the CPU"),
    Patch("torch.autocast.__init__", "autocast on the CPU"),
    Patch("torch.nn.SyncBatchNorm.forward", "SyncBatchNorm on the CPU"),
]
USED = [  # private names that the observer asks, and what a report lacks without them
    Patch("torch._C._current_graph_task_id", "whether a call is inside of a backward pass"),
    Patch("torch._C._nn._parse_to", "module.to(3), which is translated for the CPU"),
    Patch("torch._C.Generator", "states of random number generators"),
    Patch("torch.utils._pytree.tree_leaves", "tensors in batches"),
    Patch("torch.utils._pytree.tree_map_only", "the drill world-size"),
    Patch("torch.overrides._get_current_function_mode", "whether padding is cut off"),
    Patch("torch.nn.modules.batchnorm._BatchNorm", "layers that change in training mode"),
    Patch("torch.nn.modules.dropout._DropoutNd", "layers that change in training mode"),
    Patch(f"{DDP}._check_comm_hook", "communication in bfloat16 on the CPU"),
    Patch(f"{DDP}._passing_sync_batchnorm_handle", "SyncBatchNorm on the CPU"),
    Patch("torch.nn.modules.module.register_module_forward_pre_hook", "evaluations"),
    Patch("torch.optim.optimizer.register_optimizer_step_pre_hook", "all steps"),
]
BY_NAME = {patch.name: patch for patch in PATCHES}
missing = []  # patches of functions that this PyTorch does not have


def resolve(name):
    """Return the object that has a function or method, and the last part of its name.

    Raises an ImportError or AttributeError if there is no such function.
    """
    owner, _, last = name.rpartition(".")
    parts = owner.split(".")
    for count in range(len(parts), 0, -1):
        try:
            place = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            place = getattr(place, part)
        getattr(place, last)
        return place, last
    raise ModuleNotFoundError(name)


def replace(owner, name, function, also=None):
    """Replace a function or method by one that is called with the original as first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return function(original, *args, **kwargs)

    for place in (owner, also or owner):
        setattr(place, name, replacement)


def patch(*names):
    """Let calls of these functions go through the decorated one, which gets the original first."""

    def decorate(function):
        for name in names:
            entry = BY_NAME[name]
            try:
                owner, last = resolve(name)
            except (ImportError, AttributeError):
                missing.append(entry)
                continue
            replace(owner, last, function, entry.also and importlib.import_module(entry.also))
        return function

    return decorate
