"""The table of PyTorch's releases in lookup/README.md."""

import inspect

import pytest
import torch
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP

SINCE = {
    "--numa-binding": "2.9",
    "--signals-to-handle": "2.10",
    "--virtual-local-rank": "2.10",
    "--shutdown-timeout": "2.12",
    "forward_sync_buffers": "2.13",
}


@pytest.mark.weekly("changes with PyTorch alone")
def test_the_release_that_brought_it():
    """This also holds on the oldest PyTorch."""
    known = get_args_parser().format_help() + str(inspect.signature(DDP))
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert {name for name in SINCE if name in known} == {
        name for name, since in SINCE.items() if release >= tuple(map(int, since.split(".")))
    }
