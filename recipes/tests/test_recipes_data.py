"""Recipes that change the data and how it reaches the ranks."""

import json
import os
import random
import shutil
import subprocess
import sys
from textwrap import indent

import numpy as np
import pytest
import torch
from patching import on_screen
from running import (
    IMPATIENT,
    LENGTH,
    ONE,
    TWO,
    printed,
    ran,
    refused,
    script,
    stopped,
    told,
)
from support.jobs import run
from support.positions import BATCH
from support.results import resumed, same_bits
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SLOW = pytest.mark.slow
# The first pixel of each training image encodes its index, and each rank records its batches, one
# per line.
TRAINING_SET = "    return TensorDataset(shifted, labels[train].repeat(9)), "
INDEXED = (
    TRAINING_SET,
    f"    shifted[:, 0, 0, 0] = torch.arange(len(shifted)) / len(shifted)\n{TRAINING_SET}",
)
SEEN = f"""\
            with open(f"seen{{dist.get_rank()}}", "a") as file:
                indices = (source[:, 0, 0, 0] * 12942).round().int().tolist()
                print([self.epochs_run, indices, targets.tolist()], file=file)
{BATCH}"""


def seen(folder, rank):
    """Return the batches of a rank: [epoch, indices, targets]."""
    lines = (folder / f"seen{rank}").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def interrupted_and_resumed(folder, name, *changes, step=SEEN, args=ONE, later=()):
    """Run a recipe that is told to stop in its first epoch; start it again; return the Result."""
    stop = told(0)[1].removesuffix(BATCH)
    stopped(script(folder, name, *changes, (BATCH, stop + step)), *args)
    return ran(folder, name, *changes, *later, (BATCH, step), args=args)


@SLOW
def test_loader_workers(tmp_path):
    """Forked workers, spawned ones after a stop mid-epoch, or no workers: the noise is the same."""
    spawned = (
        "num_workers=2",
        'num_workers=1, multiprocessing_context="spawn", persistent_workers=True',
    )
    name, none = "loader_workers", ("num_workers=2", "num_workers=0")
    job = interrupted_and_resumed(tmp_path / "a", name, *LENGTH, step=BATCH, later=[spawned])
    assert same_bits(job, ran(tmp_path / "b", name, none))


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


LARGE = """
import torch
from torch.utils.data import DataLoader

for sample in DataLoader(list(torch.zeros(2, 100_000)), num_workers=1):
    pass
"""


def may_mount():
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tools = shutil.which("unshare") and os.path.isdir("/dev/shm")
    return tools and subprocess.run(mount, check=False, capture_output=True).returncode == 0


@SLOW
@pytest.mark.skipif(not may_mount(), reason="mounts a small /dev/shm, as only root can")
def test_shared_memory_is_full(tmp_path):
    """It has 128 kB, and a sample takes 400. A forked process would not see the small one."""
    path = tmp_path / "large.py"
    path.write_text(LARGE, encoding="utf-8")
    small = 'mount -t tmpfs -o size=128k tmpfs /dev/shm && exec "$@"'
    start = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, path]
    job = run(start, tmp_path)
    assert job.returncode == 1
    assert on_screen("recipes/loader_workers")[0] in job.stderr, job


@SLOW
def test_stateful_loader(tmp_path):
    """A resumed run is bit-for-bit identical, but not without the states of the workers."""
    name = "stateful_loader"
    nothing_loaded = ("staticmethod(torch.set_rng_state)", "lambda *_: None")
    samples = ("        speed = ", '        log(f"{samples:.0f} samples")\n        speed = ')
    stopped(script(tmp_path / "told", name, told(0)), *ONE)
    undisturbed = ran(tmp_path / "undisturbed", name)
    for change, nprocs in ((), 2), ([nothing_loaded], 2), ([samples], 1):
        folder = tmp_path / f"{nprocs}{len(change)}"
        shutil.copytree(tmp_path / "told", folder)
        job = ran(folder, name, *change, nprocs=nprocs)
        assert resumed(job) == [0]
        assert same_bits(job, undisturbed) == (not change)
    # In another world the epoch starts again, with all of its samples.
    assert printed(r"(\d+) samples", job) == ["12942"]


def test_number_of_workers_must_stay():
    two, one = (StatefulDataLoader(range(8), num_workers=count) for count in (2, 1))
    next(iter(two))
    one.load_state_dict(two.state_dict())
    with pytest.raises(AssertionError):
        iter(one)


# ---------------------------------------------------------------- streams and samplers


@SLOW
def test_streaming(tmp_path):
    """Of 12 941 samples, each rank gets 6470 per epoch, in 102 batches; one is dropped.

    The undisturbed run has one DataLoader worker; the other stops with two and resumes with three.
    """
    line = "    stream = Stream(data, "
    odd = (line, f"    data = torch.utils.data.Subset(data, range(12_941))\n{line}")
    alone, many = (("num_workers=2", f"num_workers={count}") for count in (1, 3))
    one, other = tmp_path / "one", tmp_path / "other"
    job = interrupted_and_resumed(one, "streaming", INDEXED, odd, args=TWO, later=[many])
    whole = ran(other, "streaming", INDEXED, odd, alone, (BATCH, SEEN), args=TWO)
    assert same_bits(job, whole)
    ranks = [seen(one, rank) for rank in (0, 1)]
    assert ranks == [seen(other, rank) for rank in (0, 1)]
    orders = []
    for epoch in (0, 1):
        batches = [[indices for number, indices, _ in of if number == epoch] for of in ranks]
        assert [[len(batch) for batch in of] for of in batches] == [[64] * 101 + [6]] * 2
        orders.append([index for of in batches for batch in of for index in batch])
        assert len(set(orders[epoch])) == 12_940
        assert orders[epoch] != sorted(orders[epoch])
    assert orders[0] != orders[1]


@SLOW
def test_weighted_sampler(tmp_path):
    """One sample in 90 is a zero, but one in ten of those that are drawn."""
    rare = (
        TRAINING_SET,
        "    digits = labels[train].repeat(9)\n"
        "    kept = (digits > 0) | (torch.arange(len(digits)) % 10 == 0)\n"
        "    return TensorDataset(shifted[kept], digits[kept]), ",
    )
    one, other, changes = tmp_path / "one", tmp_path / "other", (INDEXED, rare, *LENGTH)
    job = interrupted_and_resumed(one, "weighted_sampler", *changes, args=TWO)
    whole = ran(other, "weighted_sampler", *changes, (BATCH, SEEN), args=TWO)
    assert same_bits(job, whole)
    batches = [seen(one, rank) for rank in (0, 1)]
    assert batches == [seen(other, rank) for rank in (0, 1)]
    digits = [digit for part in batches for _, _, digits in part for digit in digits]
    assert 0.09 < digits.count(0) / len(digits) < 0.11
    first, second = ([indices for epoch, indices, _ in batches[0] if epoch == n] for n in (0, 1))
    assert first != second
    mine, others = ({n for _, indices, _ in part for n in indices} for part in batches)
    assert len(mine & others) < 0.9 * len(mine)


@SLOW
def test_prepare_once(tmp_path):
    """Two nodes with their own disks; one takes longer than the timeout to prepare its data.

    Here, a node is a rank in its own folder.
    """
    save, main = "        torch.save((scans, labels)", "@record"
    slow = f'        print("prepares", flush=True)\n        time.sleep({{}})\n{save}'
    nodes = """\
os.environ["LOCAL_RANK"] = "0"
os.mkdir(os.environ["RANK"])
os.chdir(os.environ["RANK"])


"""
    one_of_them = (save, slow.format("8 * dist.get_rank()"))
    changes = IMPATIENT, one_of_them, (main, nodes + main)
    args = (*ONE, f"--checkpoint-path={tmp_path}/both.pt")
    job = ran(tmp_path, "prepare_once", *changes, args=args)
    assert job.stdout.count("prepares") == 2
    assert all((tmp_path / rank / "digits.pt").exists() for rank in "01")
    impatient = ("dist.barrier(patient)", "dist.barrier()")
    job = refused(tmp_path, "prepare_once", IMPATIENT, (save, slow.format(8)), impatient)
    assert job.stdout.count("prepares") == 1  # two ranks on one node


@SLOW
def test_uneven_inputs(tmp_path):
    """Of 12 929 samples, rank 0 gets 102 batches, the last with one sample; rank 1 gets 101.

    In the steps that both take, their weights are the same, also in the second epoch.
    """
    line = "    sampler = UnevenSampler("
    odd = "    data.tensors = [part[:12_929] for part in data.tensors]\n"
    total = "sum(part.double().sum().item() for part in self.model.parameters())"
    step = indent(SEEN.replace("targets.tolist()", total), "    ")
    changes = INDEXED, (line, odd + line), (indent(BATCH, "    "), step)
    ran(tmp_path, "uneven_inputs", *changes, args=TWO)
    batches = [seen(tmp_path, rank) for rank in (0, 1)]
    for epoch in (0, 1):
        mine = [[indices for number, indices, _ in part if number == epoch] for part in batches]
        assert [len(part) for part in mine] == [102, 101]
        dealt = sorted(index for part in mine for indices in part for index in indices)
        assert dealt == list(range(12_929))
        totals = [[total for number, _, total in part if number == epoch] for part in batches]
        assert totals[0][:101] == totals[1]
    alone = ("with self.model.join():", "if True:"), ("dist.broadcast_object_list(state)", "pass")
    refused(tmp_path / "alone", "uneven_inputs", *changes, IMPATIENT, *alone, args=TWO)
