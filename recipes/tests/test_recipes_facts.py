"""What the recipes' pages say about PyTorch, shown without a run of theirs."""

import copy
import re
from functools import partial

import pytest
import torch
from patching import on_screen, text_of
from support.scripts import load
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Reentrant(nn.Sequential):
    def forward(self, images):
        return checkpoint_sequential(self, 3, images, use_reentrant=True)


def two_steps(model):
    for _ in range(2):
        model(torch.ones(2, 1, 8, 8)).sum().backward()


def scaled_step(parameter):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(torch.optim.SGD([parameter]))


def refusals(model):
    """Yield a page, the number of a message in its table, and what raises it."""
    ddp = DDP(model)
    ddp.module[:5].requires_grad_(False)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    yield "activation_checkpointing", 1, lambda: two_steps(DDP(Reentrant(*model)))
    recompute = partial(checkpoint, use_reentrant=False)
    x, lengths, branches = torch.ones(1, requires_grad=True), iter([2, 1]), iter([True, False])
    longer = lambda x: torch.cat([x] * next(lengths)).sin()  # noqa: E731
    branch = lambda x: x.sin().cos() if next(branches) else x.sin()  # noqa: E731
    yield "activation_checkpointing", 2, lambda: recompute(longer, x).sum().backward()
    yield "activation_checkpointing", 3, lambda: recompute(branch, x).sum().backward()
    yield "compile", 0, lambda: model.load_state_dict(torch.compile(model).state_dict())
    if torch.version.cuda is None:
        yield "compressed_gradients", 0, lambda: ddp.register_comm_hook(None, bf16_compress_hook)
    yield "frozen_layers", 0, lambda: two_steps(ddp)
    yield "frozen_layers", 1, lambda: DDP(nn.Linear(1, 1).requires_grad_(False))
    half = nn.Parameter(torch.ones(1, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    yield "fp16_scaler", 0, lambda: scaled_step(half)
    yield "fp16_scaler", 1, lambda: scaled_step(nn.Parameter(torch.ones(1)))
    yield "fsdp2", 0, lambda: fully_shard(last)
    yield "sync_batchnorm", 0, lambda: DDP(nn.SyncBatchNorm(1))
    yield "sync_batchnorm", 1, lambda: nn.SyncBatchNorm(1)(torch.ones(2, 1))
    yield "sync_batchnorm", 2, lambda: nn.BatchNorm1d(64)(torch.ones(1, 64))


def test_messages(process_group):
    """What the pages warn of fails as their tables of symptoms say; the first also warns."""
    first, *others = refusals(load("05").build_model(1))
    with pytest.warns(UserWarning, match=re.escape(on_screen(f"recipes/{first[0]}")[0])):
        fails(*first)
    for other in others:
        fails(*other)


def fails(name, number, refused):
    with pytest.raises((AssertionError, RuntimeError, TypeError, ValueError)) as raised:
        refused()
    assert on_screen(f"recipes/{name}")[number] in f"{raised.typename}: {raised.value}"


@pytest.mark.slow
def test_what_compiles_a_sequential(process_group):
    """Before DDP, it is one graph for each of its three buckets; after DDP, none."""
    found = []
    count = {"backend": lambda graph, _: found.append(graph) or graph}
    ddp = partial(DDP, bucket_cap_mb=2)
    for wrap, wanted in (
        (lambda model: ddp(torch.compile(model, **count)), 3),
        (lambda model: torch.compile(ddp(model), **count), 0),
    ):
        torch.compiler.reset()
        found.clear()
        wrap(load("05").build_model(256))(torch.ones(2, 1, 8, 8))
        assert len(found) == wanted


def test_activation_checkpointing_keeps_less():
    """Count the bytes that forward() keeps for backward()."""
    exec(text_of("recipes/activation_checkpointing"), recipe := {"__name__": "recipe"})
    found = []
    for build in load("05").build_model, recipe["build_model"]:
        sizes = []
        keep = lambda tensor: sizes.append(tensor.nbytes) or tensor  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            build(32)(torch.ones(16, 1, 8, 8))
        found.append(sum(sizes))
    assert found[1] < 0.5 * found[0]
