"""Recipes that change the data and how it reaches the ranks."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from textwrap import indent

import numpy as np
import psutil
import pytest
import torch
from support import server
from support.jobs import Job, finished, run
from support.positions import BATCH, stopped, told
from support.results import accuracy, same_bits
from support.scripts import SMALL, command, forked, on_screen, patched
from torch.utils.data import DataLoader, Dataset

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


def seen(tmp_path, rank):
    """Return the batches of a rank: [epoch, indices, targets]."""
    lines = (tmp_path / f"seen{rank}").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def interrupted_and_resumed(tmp_path, name, *changes, step=SEEN, args=("1", *SMALL), resumed=()):
    """Run a recipe that is told to stop in its first epoch; start it again; return the Result."""
    tmp_path.mkdir()
    stop = told(0)[1].removesuffix(BATCH)
    stopped(patched(tmp_path, name, *changes, (BATCH, stop + step)), *args)
    again = forked(patched(tmp_path, name, *changes, *resumed, (BATCH, step)), *args)
    return finished(again, tmp_path)


def undisturbed(tmp_path, name, *changes, step=SEEN, args=("1", *SMALL)):
    tmp_path.mkdir()
    return finished(forked(patched(tmp_path, name, *changes, (BATCH, step)), *args), tmp_path)


# ---------------------------------------------------------------- DataLoader workers


@SLOW
def test_loader_workers(tmp_path):
    """Forked workers, spawned ones after a stop mid-epoch, or no workers: the noise is the same."""
    name = "recipes/loader_workers"
    spawned = (
        "num_workers=2",
        'num_workers=1, multiprocessing_context="spawn", persistent_workers=True',
    )
    none = ("num_workers=2", "num_workers=0")
    job = interrupted_and_resumed(tmp_path / "a", name, step=BATCH, resumed=[spawned])
    assert same_bits(job, undisturbed(tmp_path / "b", name, none, step=BATCH))


class Drawn(Dataset):
    """Returns what the random generators of a DataLoader worker draw."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(()).item(), np.random.rand(), random.random()


def test_workers_are_seeded_alike():
    """This holds for two ranks with the same seed, and so for a rank that is resumed."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(sorted(DataLoader(Drawn(), batch_size=None, num_workers=2)))
    assert drawn[0] == drawn[1]
    assert [len(set(numbers)) for numbers in zip(*drawn[0])] == [4, 4, 4, 4]


FAILS = """
import signal

from torch.utils.data import DataLoader


class Data(list):
    def __getitem__(self, index):
        raise RuntimeError("a file is broken")


def outlive_sigterm(worker_id):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


for number in DataLoader(Data(range(100)), num_workers=2, worker_init_fn=outlive_sigterm):
    pass
"""


SOON = ("signal.alarm(300)", "signal.alarm(3)")


def test_a_failed_rank_waits_for_its_workers(tmp_path):
    """If it ends by itself, `outlive_sigterm` may ignore the signal for good."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS, encoding="utf-8")
    with Job([sys.executable, script], tmp_path) as job:
        job.wait_for(lambda: "RuntimeError: a file is broken" in job.stderr)
        time.sleep(3)
        assert job.process.poll() is None
        for worker in psutil.Process(job.process.pid).children():
            worker.kill()
        assert job.wait().returncode == 1


def may_mount():
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tools = shutil.which("unshare") and os.path.isdir("/dev/shm")
    return tools and subprocess.run(mount, check=False, capture_output=True).returncode == 0


@SLOW
@pytest.mark.skipif(not may_mount(), reason="mounts a small /dev/shm, as only root can")
def test_shared_memory_is_full(tmp_path):
    """It has 128 kB, and a batch takes 65. Forked ranks would not see the small one."""
    start = command(patched(tmp_path, "recipes/loader_workers", SOON), "1", "--batch-size=256")
    small = 'mount -t tmpfs -o size=128k tmpfs /dev/shm && exec "$@"'
    job = run(["unshare", "--mount", "sh", "-c", small, "sh", *start], tmp_path)
    assert job.returncode == 1
    assert on_screen("recipes/loader_workers")[0] in job.stderr, job


DIES = """
import os
import signal

from torch.utils.data import DataLoader


class Data(list):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)


for number in DataLoader(Data([1]), num_workers=1):
    pass
"""


@SLOW
def test_bus_error(tmp_path):
    """PyTorch 2.13 no longer causes it, so the test sends the signal; the message is PyTorch's."""
    script = tmp_path / "dies.py"
    script.write_text(DIES, encoding="utf-8")
    job = run(server.command(script), tmp_path)
    assert on_screen("recipes/loader_workers")[-1] in job.stderr, job


# ---------------------------------------------------------------- streams and samplers


@SLOW
def test_streaming(tmp_path):
    """Of 12 941 samples, each rank gets 6470 per epoch, in 102 batches; one is dropped.

    The undisturbed run has one DataLoader worker; the other stops with two and resumes with three.
    """
    name, args = "recipes/streaming", ("2", *SMALL)
    odd = (
        "    stream = Stream(dataset, ",
        "    dataset = torch.utils.data.Subset(dataset, range(12_941))\n"
        "    stream = Stream(dataset, ",
    )
    alone, many = (("num_workers=2", f"num_workers={count}") for count in (1, 3))
    one, other = tmp_path / "one", tmp_path / "other"
    job = interrupted_and_resumed(one, name, INDEXED, odd, args=args, resumed=[many])
    assert same_bits(job, undisturbed(other, name, INDEXED, odd, alone, args=args))
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


@pytest.mark.weekly
def test_streaming_learns(tmp_path):
    """As well as step 5, with three ranks; test_recipe_ends_well runs it with two."""
    job = finished(forked(patched(tmp_path, "recipes/streaming"), nprocs=3), tmp_path)
    assert accuracy(job)[0] >= 98


@SLOW
def test_weighted_sampler(tmp_path):
    """One sample in 90 is a zero, but one in ten of those that are drawn."""
    name = "recipes/weighted_sampler"
    rare = (
        "    return TensorDataset(shifted, labels[train].repeat(9)), ",
        "    digits = labels[train].repeat(9)\n"
        "    kept = (digits > 0) | (torch.arange(len(digits)) % 10 == 0)\n"
        "    return TensorDataset(shifted[kept], digits[kept]), ",
    )
    one, other = tmp_path / "one", tmp_path / "other"
    job = interrupted_and_resumed(one, name, INDEXED, rare, args=("2", *SMALL))
    assert same_bits(job, undisturbed(other, name, INDEXED, rare, args=("2", *SMALL)))
    batches = [seen(one, rank) for rank in (0, 1)]
    assert batches == [seen(other, rank) for rank in (0, 1)]
    for epoch in (0, 1):
        of_rank = [[batch for batch in part if batch[0] == epoch] for part in batches]
        indices, digits = (
            [[number for batch in part for number in batch[i]] for part in of_rank] for i in (1, 2)
        )
        assert len(indices[0]) == len(indices[1])
        assert len(set(indices[0]) & set(indices[1])) < 0.6 * len(set(indices[0]))
        share = (digits[0] + digits[1]).count(0) / len(digits[0] + digits[1])
        assert 0.09 < share < 0.11
    first, second = ([batch[1] for batch in batches[0] if batch[0] == epoch] for epoch in (0, 1))
    assert first != second


# ---------------------------------------------------------------- one rank before the others


@SLOW
def test_prepare_once(tmp_path):
    """Two nodes with their own disks; one takes longer than the timeout to prepare its data.

    Here, a node is a rank in its own folder.
    """
    name, save = "recipes/prepare_once", "        torch.save((scans, labels)"
    short = ("timedelta(minutes=5)", "timedelta(seconds=5)")
    slow = f'        print("prepares", flush=True)\n        time.sleep({{}})\n{save}'
    main = "@record"
    nodes = """\
os.environ["LOCAL_RANK"] = "0"
os.mkdir(os.environ["RANK"])
os.chdir(os.environ["RANK"])


"""
    one_of_them = (save, slow.format("8 * dist.get_rank()"))
    path = patched(tmp_path, name, short, one_of_them, (main, nodes + main))
    job = finished(forked(path, "1", *SMALL, f"--checkpoint-path={tmp_path}/both.pt"), tmp_path)
    assert job.stdout.count("prepares") == 2
    assert all((tmp_path / rank / "digits.pt").exists() for rank in "01")
    impatient = ("dist.barrier(patient)", "dist.barrier()")
    path = patched(tmp_path, name, short, (save, slow.format(8)), impatient)
    job = run(forked(path, "1", *SMALL), tmp_path)
    assert job.returncode == 1
    assert job.stdout.count("prepares") == 1  # two ranks on one node
    for text in on_screen(name):
        assert text in job.stderr, job


@SLOW
def test_uneven_inputs(tmp_path):
    """Of 12 929 samples, rank 0 gets 102 batches, the last with one sample; rank 1 gets 101.

    In the steps that both take, their weights are the same, also in the second epoch.
    """
    name, line = "recipes/uneven_inputs", "    sampler = UnevenSampler("
    odd = "    dataset.tensors = [part[:12_929] for part in dataset.tensors]\n"
    total = "sum(part.double().sum().item() for part in self.model.parameters())"
    step = indent(SEEN.replace("targets.tolist()", total), "    ")
    changes = (line, odd + line), (indent(BATCH, "    "), step)
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    finished(forked(patched(one, name, INDEXED, *changes), "2", *SMALL), one)
    batches = [seen(one, rank) for rank in (0, 1)]
    for epoch in (0, 1):
        mine = [[indices for number, indices, _ in part if number == epoch] for part in batches]
        assert [len(part) for part in mine] == [102, 101]
        dealt = sorted(index for part in mine for indices in part for index in indices)
        assert dealt == list(range(12_929))
        totals = [[total for number, _, total in part if number == epoch] for part in batches]
        assert totals[0][:101] == totals[1]
    short = ("timedelta(minutes=5)", "timedelta(seconds=5)")
    alone = ("with self.model.join():", "if True:"), ("dist.broadcast_object_list(state)", "pass")
    job = run(forked(patched(other, name, INDEXED, *changes, short, *alone), "2", *SMALL), other)
    assert job.returncode == 1
    for text in on_screen(name):
        assert text in job.stderr, job
