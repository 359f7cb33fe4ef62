"""Runs lines of code, given as JSON, that make PyTorch print its messages."""
# ruff: noqa: F401, these lines use what is imported

import copy
import json
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SECOND = timedelta(seconds=1)
HERE = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
LAYOUTS = (torch.contiguous_format, torch.channels_last)
ONE = ["--standalone", "--nproc-per-node=1", "--no-python", "bash", "-c"]
NODES = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--no-python"]


class Checkpointed(nn.Linear):
    def forward(self, source):
        return checkpoint(super().forward, source, use_reentrant=True)


class Broken(list):
    def __getitem__(self, index):
        os.kill(os.getpid(), 9)


def sharded(**options):
    """Return a model of a block and a head under FSDP1."""
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    options |= {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})}
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


def trained(model):
    model(source).sum().backward()
    return model


def summoned(model, **options):
    """Compute something outside of the wrapper, as `generate` does."""
    with FullyShardedDataParallel.summon_full_params(model, **options):
        return model.module(source)


line, source = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=60 * SECOND)
        rank = dist.get_rank()
        impatient, sizes, strides = (dist.new_group(timeout=3 * SECOND) for _ in range(3))
    os.environ.pop("OMP_NUM_THREADS", None)
    for code in json.loads(sys.argv[1]):
        try:
            eval(code)
            print("works:", code, flush=True)
        except (Exception, SystemExit):
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # the group is broken by now
