"""Makes PyTorch print its messages: alone, or on each of two ranks if RANK is set."""

import copy
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import multiprocessing, nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SECOND = timedelta(seconds=1)
ONE = ["--standalone", "--nproc-per-node=1", "--no-python", "bash", "-c"]
ENDS = ["exit 1", "exit 2", "exit 75", *(f"kill -{number} $BASHPID" for number in (6, 7, 9, 11))]
NODES = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--no-python"]


class Checkpointed(nn.Linear):
    def forward(self, source):
        return checkpoint(super().forward, source, use_reentrant=True)


class Broken(list):
    def __getitem__(self, index):
        os.kill(os.getpid(), 9)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)

    def forward(self, source):
        return self.head(self.block(source))


def sharded(**options):
    policy = ModuleWrapPolicy({nn.Sequential})
    options["device_id"] = torch.device("cpu")
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, **options)


def summoned(model, **options):
    """Compute something outside of the wrapper, as `generate` does."""
    with FullyShardedDataParallel.summon_full_params(model, **options):
        return model.module(torch.ones(1, 2))


def fsdp1():
    source, each = torch.ones(1, 2), {"use_orig_params": True}
    yield lambda: FullyShardedDataParallel(nn.Linear(2, 2))
    yield lambda: sharded(**each).module(source)
    yield lambda: summoned(sharded())
    model = sharded()
    model(source).sum().backward()
    yield lambda: model.module(source)
    for options, how in (({}, {"recurse": False}), (each, {})):
        model = sharded(**options)
        model(source).sum().backward()
        summoned(model, **how)
        print("FSDP1 works with", options, how, file=sys.stderr)


def channels_last(last):
    return torch.channels_last if last else torch.contiguous_format


def on_two_ranks():
    rank = dist.get_rank()
    line, source = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    impatient, sizes, strides = (dist.new_group(timeout=3 * SECOND) for _ in range(3))
    yield lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda: DDP(nn.Linear(2, 2).requires_grad_(False))
    yield lambda: copy.deepcopy(fully_shard(nn.Linear(2, 2)))
    yield from fsdp1()
    yield lambda: DDP(line, device_ids=[0])
    yield lambda: DDP(line, device_ids=[0, 1])
    yield lambda: DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    yield lambda: DDP(nn.LazyLinear(2))
    yield lambda: DDP(nn.Linear(2, 2, bias=rank == 0))
    yield lambda: DDP(nn.Linear(2, 2 + rank), process_group=sizes)
    yield dist.barrier  # rank 1 has refused, and rank 0 still waits for it
    strided = nn.Conv2d(2, 4, 3).to(memory_format=channels_last(rank))
    yield lambda: DDP(strided, process_group=strides)
    yield dist.barrier
    yield lambda: DDP(line).fc
    again = DDP(Checkpointed(2, 2), find_unused_parameters=True)
    yield lambda: again(source).sum().backward()
    yield lambda: rank and dist.gather(torch.zeros(1), [torch.zeros(1)] * 2)
    yield lambda: rank or dist.gather(torch.zeros(1))
    yield lambda: dist.all_reduce(1.0)
    yield lambda: dist.broadcast(torch.zeros(1), 3)
    yield lambda: dist.new_group([0, 1, 2])
    yield lambda: rank or dist.monitored_barrier(impatient, timeout=SECOND)
    yield lambda: rank or dist.all_reduce(torch.ones(1), group=impatient)
    yield dist.barrier


def alone():
    line = nn.Linear(2, 2)
    address = {"init_method": "tcp://localhost:1", "world_size": 2, "timeout": SECOND}
    here = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    two, one = optim.SGD(line.parameters()), optim.SGD([line.weight])
    both = optim.SGD([{"params": [line.weight]}, {"params": [line.bias]}])
    loss = line(torch.ones(1, 2)).square().sum()
    yield lambda: os.environ["LOCAL_RANK"]
    yield dist.get_rank
    yield lambda: dist.init_process_group("gloo")
    yield lambda: dist.init_process_group("ncl", **here)
    yield lambda: dist.init_process_group("nccl", **here)
    yield lambda: dist.init_process_group("gloo", init_method="localhost://", rank=0, world_size=1)
    yield lambda: dist.init_process_group("gloo", rank=1, **address)
    yield lambda: torch.zeros(1).cuda()
    yield lambda: line.load_state_dict(nn.Linear(3, 2).state_dict())
    yield lambda: two.load_state_dict(one.state_dict())
    yield lambda: two.load_state_dict(both.state_dict())
    yield lambda: copy.deepcopy(loss)
    yield lambda: (loss.backward(), loss.backward())
    yield lambda: nn.BatchNorm1d(64)(torch.ones(1, 64))
    yield lambda: torch.save(torch.ones(10**6), "/dev/full")
    yield lambda: DistributedSampler([1], num_replicas=1, rank=1)
    yield lambda: next(iter(DataLoader([torch.ones(1), torch.ones(2)], 2)))
    yield lambda: next(iter(DataLoader(Broken([1]), num_workers=1)))
    yield lambda: multiprocessing.spawn(lambda rank: None, nprocs=1)
    yield lambda: multiprocessing.spawn(print, args=(2), nprocs=1)
    yield lambda: [multiprocessing.set_start_method("spawn") for _ in range(2)]
    yield lambda: torchrun(["--standalone"])
    yield lambda: torchrun(["--standalone", "--nproc-per-node=two", "train.py"])
    yield lambda: torchrun(["--standalone", "--nproc-per-node=gpu", "train.py"])
    yield lambda: torchrun([*NODES, "--rdzv-endpoint=:29400", "true"])
    unreachable = "--rdzv-conf=read_timeout=1,is_host=0"
    yield lambda: torchrun([*NODES, "--rdzv-endpoint=127.0.0.2:1", unreachable, "true"])
    yield lambda: torchrun(
        [*NODES, "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=1", "true"]
    )
    os.environ.pop("OMP_NUM_THREADS", None)
    yield lambda: torchrun(["--standalone", "--nproc-per-node=2", "--no-python", "true"])
    for end in ENDS:
        yield lambda end=end: torchrun([*ONE, end])


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=60 * SECOND)
    for refused in on_two_ranks() if "RANK" in os.environ else alone():
        try:
            refused()
        except (Exception, SystemExit):
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # the group is broken by now
