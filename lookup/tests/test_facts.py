"""What lookup/ says about PyTorch itself: its messages, its options, and its timeouts."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support import server
from support.jobs import finished, run
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.weekly("changes with PyTorch alone")
REFUSALS = Path(__file__).with_name("refusals.py")
# What is run, alone and on each of two ranks, and what it prints: nothing, where it has to work.
PRINTED = json.loads(Path(__file__).with_name("printed.json").read_text(encoding="utf-8"))


def shape(text):
    """Return a text without its numbers, and with its exit codes."""
    text = " ".join(text.split())
    return re.sub(r"(?<!exitcode: )(?<!exitcode: -)(?<!Signal )\b\d+(?:ms)?", "0", text)


@pytest.mark.parametrize(("where", "ranks"), [("alone", 0), ("two ranks", 2)])
def test_what_pytorch_prints(tmp_path, where, ranks):
    codes = json.dumps([code for code, *_ in PRINTED[where]])
    words = [REFUSALS, codes]
    job = run(server.command(*words, nprocs=ranks) if ranks else [sys.executable, *words], tmp_path)
    printed = shape(job.stdout + job.stderr)
    for code, *messages in PRINTED[where]:
        for message in messages or [f"works: {code}"]:
            assert shape(message) in printed, code


def test_the_release_that_brought_it():
    """Each is in the table of lookup/README.md; this also holds on the oldest PyTorch."""
    known = get_args_parser().format_help() + str(inspect.signature(DDP))
    since = {
        "--numa-binding": "2.9",
        "--signals-to-handle": "2.10",
        "--virtual-local-rank": "2.10",
        "--shutdown-timeout": "2.12",
        "forward_sync_buffers": "2.13",
    }
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert {name for name in since if name in known} == {
        name for name, version in since.items() if release >= tuple(map(int, version.split(".")))
    }


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
