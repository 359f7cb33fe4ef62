"""The messages of lookup/ that have no source are those that PyTorch prints here."""

import re
import sys
from pathlib import Path

import pytest
from support import server
from support.jobs import run
from support.scripts import ROOT

PAGES = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("lookup/*.md"))]
REFUSALS = Path(__file__).with_name("refusals.py")
ENTRIES = [
    " ".join(part.split()) for page in PAGES for part in re.split(r"^##+ ", page, flags=re.M)
]
ALONE = [
    "KeyError: 'LOCAL_RANK'",
    "Default process group has not been initialized, please make sure to call",
    "using env:// rendezvous: environment variable RANK expected, but not set",
    "Unknown backend type ncl",
    "Distributed package doesn't have NCCL built in",
    "No rendezvous handler for localhost://",
    "The client socket has timed out after 600000ms while trying to connect to",
    "Torch not compiled with CUDA enabled",
    "size mismatch for",
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    "loaded state dict has a different number of parameter groups",
    "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at",
    "Trying to backward through the graph a second time",
    "Expected more than 1 value per channel when training, got input size torch.Size([1, 64])",
    "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
    "Invalid rank 1, rank should be in the interval [0, 0]",
    "stack expects each tensor to be equal size, but got [",
    "DataLoader worker (pid(s) 4743) exited unexpectedly",
    "AttributeError: Can't pickle local object",
    "torch.multiprocessing.spawn.ProcessRaisedException:",
    "Value after * must be an iterable, not int",
    "context has already been set",
    "error: the following arguments are required: training_script",
    "Unsupported nproc_per_node value:",
    "Cuda is not available.",
    "must be a dot-separated list of labels, an IPv4 address, or an IPv6 address.",
    "RendezvousConnectionError: The connection to the C10d store has failed.",
    "RendezvousTimeoutError",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "Root Cause (first observed failure):",
    *(f"failed (exitcode: {code}) local_rank: 0 (pid: 190) of binary" for code in (1, 2, 75)),
    *(
        f"failed (exitcode: {code}) local_rank: 0 (pid: 190) of binary"
        for code in (-6, -7, -9, -11)
    ),
    *(f"Signal {code} received by PID" for code in ("6 (SIGABRT)", "7 (SIGBUS)", "9 (SIGKILL)")),
]
TWO = [
    "trying to initialize the default process group twice!",
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires",
    "FSDP does not support deepcopy. Please use state dict for serialization.",
    "FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
    "mat2 must be a matrix, got 1-D tensor",
    "Expects tensor to be unsharded with size torch.Size([20]) but got torch.Size([10])",
    "are out of bounds for storage of size 0",
    "device_ids and output_device arguments only work with single-device/multiple-device GPU",
    "device_ids can only be None or contain a single element.",
    "DistributedDataParallel's input module must be on the same type of devices",
    "Modules with uninitialized parameters can't be used with `DistributedDataParallel`.",
    "DDP expects same model across all ranks, but Rank 0 has 161 params, while rank 1 has",
    "appears not to match sizes of the same param in process 0.",
    "appears not to match strides of the same param in process 0.",
    "'DistributedDataParallel' object has no attribute 'fc'",
    "Expected to mark a variable ready only once. This error is caused by one of the following",
    "Argument ``gather_list`` must NOT be specified on non-destination ranks.",
    "Argument ``gather_list`` must be specified on destination rank.",
    "Expected parameter `tensor` of type torch.Tensor but got <class 'float'> instead.",
    "the new group's world size should be less or equal to the world size set by",
    "failed to pass monitoredBarrier in 1000 ms",
    "for recv operation to complete",
]
WORKS = ["FSDP1 works with {} {'recurse': False}", "FSDP1 works with {'use_orig_params': True} {}"]


def shape(text):
    """Return a text without its numbers, and with its exit codes."""
    text = " ".join(text.split())
    return re.sub(r"(?<!exitcode: )(?<!exitcode: -)(?<!Signal )\b\d+(?:ms)?", "0", text)


@pytest.mark.parametrize(
    ("messages", "ranks"), [(ALONE, 0), (TWO + WORKS, 2)], ids=["alone", "two-ranks"]
)
def test_what_pytorch_prints(tmp_path, messages, ranks):
    start = server.command(REFUSALS, nprocs=ranks) if ranks else [sys.executable, REFUSALS]
    job = run(start, tmp_path)
    printed = shape(job.stdout + job.stderr)
    assert [text for text in messages if shape(text) not in printed] == []


def test_an_entry_says_what_to_do_about_it():
    """Such an entry has no source: its message is not quoted, but seen."""
    seen = [entry for entry in ENTRIES if "[source]" not in entry]
    assert [text for text in (*ALONE, *TWO) if not any(text in entry for entry in seen)] == []
