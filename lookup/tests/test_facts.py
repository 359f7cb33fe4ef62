"""What the tutorial says about PyTorch, shown without the scripts."""

import inspect
import sys
import zipfile

import pytest
import torch
from support.jobs import finished
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler


def shards(world_size, epoch, length=12_942, **options):
    """Return the indices that DistributedSampler gives each rank, as lists."""
    samplers = [
        DistributedSampler(range(length), world_size, rank, **options) for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def test_shards_cover_the_data_and_a_step_of_all_is_one_of_one_process():
    (one,) = shards(1, 3)
    for world_size in (2, 3, 5, 4096):
        dealt = [index for step in zip(*shards(world_size, 3), strict=True) for index in step]
        assert dealt[:12_942] == one
        assert len(dealt) == 12_942 + -12_942 % world_size
    assert {*one} == {*range(12_942)}


def test_a_new_order_needs_set_epoch_and_the_padding_is_the_first_samples_again():
    sampler = DistributedSampler(range(100), 2, 0)
    assert list(sampler) == list(sampler) != shards(2, 1, 100)[0]
    assert shards(3, 0, 10, shuffle=False) == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    dropped = shards(3, 0, 10, shuffle=False, drop_last=True)
    assert dropped == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_a_flipped_byte_is_found_by_testzip_and_not_by_torch_load(tmp_path):
    path, tensor = tmp_path / "tensor.pt", torch.arange(100.0)
    torch.save({"tensor": tensor}, path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(whole)
    assert not torch.equal(torch.load(path, weights_only=True)["tensor"], tensor)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "tensor/data/0"


def test_the_release_that_brought_it():
    """Each is in lookup/versions.md; this also holds on another PyTorch than the pinned one."""
    known = get_args_parser().format_help() + str(inspect.signature(DDP))
    since = {
        "--numa-binding": "2.9",
        "--signals-to-handle": "2.10",
        "--virtual-local-rank": "2.10",
        "--shutdown-timeout": "2.12",
        "forward_sync_buffers": "2.13",
    }
    assert {name for name in since if name in known} == {
        name for name, version in since.items() if torch.__version__ >= version
    }


LEFT = """
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
EARLY
threads = len(os.listdir("/proc/self/task"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
DDP(torch.nn.Linear(1, 1))
dist.destroy_process_group()
time.sleep(1)  # Linux lists a thread for a moment after it has ended
print(len(os.listdir("/proc/self/task")) > threads)
"""


@pytest.mark.parametrize(("early", "alive"), [("", True), ("import torch.distributed.nn", False)])
def test_a_late_import_keeps_the_process_group_alive(tmp_path, early, alive):
    """torch.distributed.nn has the group as a default argument, and the first DDP() imports it."""
    program = [sys.executable, "-c", LEFT.replace("EARLY", early)]
    assert finished(program, tmp_path).stdout == f"{alive}\n"


WAITS = """
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", timeout=timedelta(minutes=5), **alone)
groups = dist.group.WORLD, init_device_mesh("cpu", (1,)).get_group(), dist.new_group()
waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
print(*waits, c10d._get_default_timeout(dist.Backend("cpu:gloo,cuda:nccl")))
dist.destroy_process_group()
"""


def test_a_timeout_is_that_of_the_default_group_alone(tmp_path):
    job = finished([sys.executable, "-c", WAITS], tmp_path)
    assert job.stdout == "0:05:00 0:05:00 0:30:00 0:30:00\n"
