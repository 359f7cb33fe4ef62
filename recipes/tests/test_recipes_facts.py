"""What the recipes' pages say about PyTorch, shown without a run of theirs."""

import copy
import os
import random
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from patching import on_screen, text_of
from support.jobs import run
from support.scripts import load
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader


def test_workers_are_seeded_alike():
    """This holds for two ranks with the same seed, and so for a rank that is resumed."""
    draw = lambda index: (index, torch.rand(()).item(), np.random.rand(), random.random())  # noqa: E731
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        data = DataLoader(range(4), batch_size=None, num_workers=2, collate_fn=draw)
        drawn.append(sorted(data))
    assert drawn[0] == drawn[1]
    assert [len(set(numbers)) for numbers in zip(*drawn[0])] == [4, 4, 4, 4]


ALONE = ["unshare", "--mount", "sh", "-c"]
MOUNT = "mount -t tmpfs -o size=128k tmpfs /dev/shm"


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.call([*ALONE, MOUNT]) != 0, reason="mounts a small /dev/shm"
)
def test_shared_memory_is_full(tmp_path):
    """It has 128 kB, and a sample takes 400. A forked process would not see the small one."""
    code = "import torch; from torch.utils.data import DataLoader\n"
    code += "next(iter(DataLoader(list(torch.zeros(2, 100_000)), num_workers=1)))"
    job = run([*ALONE, f'{MOUNT} && exec "$@"', "sh", sys.executable, "-c", code], tmp_path)
    assert job.returncode == 1
    assert on_screen("recipes/loader_workers")[0] in job.stderr, job


class Reentrant(nn.Sequential):
    def forward(self, images):
        return checkpoint_sequential(self, 3, images, use_reentrant=True)


def two_steps(model):
    for _ in range(2):
        model(torch.ones(2, 1, 8, 8)).sum().backward()


def refusals(model):
    """Yield a page, the number of a message in its table, and what raises it."""
    ddp = DDP(model)
    ddp.module[:5].requires_grad_(False)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    yield "activation_checkpointing", 1, lambda: two_steps(DDP(Reentrant(*model)))
    yield "compile", 0, lambda: model.load_state_dict(torch.compile(model).state_dict())
    if torch.version.cuda is None:
        yield "compressed_gradients", 0, lambda: ddp.register_comm_hook(None, bf16_compress_hook)
    yield "frozen_layers", 0, lambda: two_steps(ddp)
    yield "fsdp2", 0, lambda: fully_shard(last)
    yield "sync_batchnorm", 0, lambda: DDP(nn.SyncBatchNorm(1))
    yield "sync_batchnorm", 1, lambda: nn.SyncBatchNorm(1)(torch.ones(2, 1))


def test_messages(process_group):
    """What the pages warn of fails as their tables of symptoms say; the first also warns."""
    first, *others = refusals(load("05").build_model(1))
    with pytest.warns(UserWarning, match=re.escape(on_screen(f"recipes/{first[0]}")[0])):
        fails(*first)
    for other in others:
        fails(*other)


def fails(name, number, refused):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
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
