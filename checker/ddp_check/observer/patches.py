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

import torch
from torch.distributed import distributed_c10d

OLDEST = "2.8"  # version that is promised
C10D = "torch.distributed.distributed_c10d"
DDP = "torch.nn.parallel.DistributedDataParallel"
ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
SCALER = "torch.amp.GradScaler"
RNG = "torch.random"
CLIP = "torch.nn.utils.clip_grad"
SCHEDULERS = "torch.optim.lr_scheduler"
SCHEDULED = [  # the others do not call the step of the first one
    "LRScheduler",
    "ReduceLROnPlateau",
    "ChainedScheduler",
    "SequentialLR",
    "CosineAnnealingWarmRestarts",
]
COLLECTIVE = "all_|reduce(?!_op)|broadcast|gather|scatter|barrier|monitored_barrier"
COLLECTIVES = [f"{C10D}.{name}" for name in distributed_c10d.__all__ if re.match(COLLECTIVE, name)]

PATCHES = {  # what is replaced: what a report lacks if PyTorch has no such function
    # process group
    f"{C10D}.init_process_group": "the process group",
    f"{C10D}.destroy_process_group": "how the group is left",
    **dict.fromkeys(COLLECTIVES, "a collective"),
    # data
    "torch.utils.data.DataLoader.__init__": "the batch of the drill world-size",
    f"{ITERATOR}.__init__": "all passes over the data",
    f"{ITERATOR}._reset": "passes with persistent workers",
    f"{ITERATOR}._next_index": "which samples a batch has",
    f"{ITERATOR}.__next__": "all batches",
    "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch": "random numbers in samples",
    "torch.utils.data.distributed.DistributedSampler.set_epoch": "calls of set_epoch",
    # random numbers
    f"{RNG}.manual_seed": "who draws random numbers",
    "torch.manual_seed": "who draws random numbers",  # another function once dynamo is imported
    f"{RNG}.seed": "who draws random numbers",
    f"{RNG}.set_rng_state": "who draws random numbers",
    # models and optimizers
    f"{DDP}.__init__": "wrapped models",
    f"{DDP}.forward": "calls of wrapped models",
    f"{DDP}.register_comm_hook": "hooks that replace the mean of the gradients",
    "torch.autograd.backward": "losses and backward passes",
    f"{SCALER}.scale": "losses that a GradScaler scales",
    f"{SCALER}.unscale_": "clipping of scaled gradients",
    f"{SCALER}.step": "steps that a GradScaler skips",
    f"{CLIP}.clip_grad_norm_": "clipping",
    f"{CLIP}.clip_grad_value_": "clipping",
    "torch.nn.Module.load_state_dict": "states that are loaded",
    "torch.optim.Optimizer.load_state_dict": "states that are loaded",
    "torch.optim.Optimizer.add_param_group": "whether gradients are a sum or a mean",
    **{f"{SCHEDULERS}.{name}.step": "steps of schedulers" for name in SCHEDULED},
    # files
    "torch.save": "files that are saved",
    "torch.load": "files that are loaded",
    "torch.distributed.checkpoint.save": "sharded checkpoints",
    "torch.distributed.checkpoint.async_save": "sharded checkpoints",
    "torch.distributed.checkpoint.load": "sharded checkpoints",
    # GPU calls that are translated for the CPU
    "torch.amp.GradScaler.__init__": "GradScaler on the CPU",
    "torch.autocast.__init__": "autocast on the CPU",
    "torch.nn.SyncBatchNorm.forward": "SyncBatchNorm on the CPU",
}
USED = {  # private names that the observer asks: what a report lacks without them
    "torch._C._current_graph_task_id": "whether a call is inside of a backward pass",
    "torch._C._nn._parse_to": "module.to(3), which is translated for the CPU",
    "torch._C.Generator": "states of random number generators",
    "torch.utils._pytree.tree_leaves": "tensors in batches",
    "torch.utils._pytree.tree_map_only": "the drill world-size",
    "torch.overrides._get_current_function_mode": "whether padding is cut off",
    "torch.nn.modules.batchnorm._BatchNorm": "layers that change in training mode",
    "torch.nn.modules.dropout._DropoutNd": "layers that change in training mode",
    f"{DDP}._check_comm_hook": "communication in bfloat16 on the CPU",
    f"{DDP}._passing_sync_batchnorm_handle": "SyncBatchNorm on the CPU",
    "torch.nn.modules.module.register_module_forward_pre_hook": "evaluations",
    "torch.optim.optimizer.register_optimizer_step_pre_hook": "all steps",
}
missing = []  # names of functions that this PyTorch does not have


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


def intercept(owner, name, function):
    """Replace a function or method by one that is called with the original as first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return function(original, *args, **kwargs)

    for place in (owner, torch, torch.distributed, torch.nn.utils):  # the latter pass on some
        if getattr(place, name, None) is original:
            setattr(place, name, replacement)


def patch(*names):
    """Let calls of these functions, each in `PATCHES`, go through the decorated one.

    It gets the original as its first argument.
    """

    def decorate(function):
        for name in names:
            try:
                owner, last = resolve(name)
            except (ImportError, AttributeError):
                missing.append(name)
            else:
                intercept(owner, last, function)
        return function

    return decorate
