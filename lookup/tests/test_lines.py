"""Lines of lookup/ about data, checkpoints and large models do what the page says."""

import os
import re
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.jobs import finished
from support.results import said
from support.scripts import ON_PATH, ROOT, forked
from torch import nn
from torch.utils.data import DataLoader

INSTALL = "pip install -r lookup/requirements.txt"


def blocks(page, title, language="python"):
    """Return the blocks of code in the entry of a page whose title starts like this."""
    text = (ROOT / "lookup" / f"{page}.md").read_text(encoding="utf-8")
    (entry,) = re.findall(rf"^### {re.escape(title)}.*\n((?:(?!##+ ).*\n)*)", text, re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```$", entry, re.MULTILINE | re.DOTALL)


def defined(code, **names):
    """Run printed code here; return what it defines."""
    given = {"torch": torch, "nn": nn, "np": np, "os": os, **vars(torch.utils.data), **names}
    exec(compile(code, "printed", "exec"), given)
    return given


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_divided_among_ranks_and_workers(monkeypatch, workers):
    divide, stop = blocks("data", "Every GPU gets the same data")
    names = {"itertools": SimpleNamespace(islice=islice)}

    class Stream(torch.utils.data.IterableDataset):
        __iter__ = defined(divide, **names)["__iter__"]

        def read(self):
            return iter(range(101))

    seen, steps = [], []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        seen += chain(*(batch.tolist() for batch in DataLoader(Stream(), 4, num_workers=workers)))
        some = []
        loader = DataLoader(Stream(), 4, num_workers=workers)
        defined(stop, loader=loader, batches=12, train=some.append, **names)
        steps.append(len(some))
    assert sorted(seen) == list(range(101))
    assert steps == [12, 12]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_file_is_opened_in_each_worker(tmp_path, monkeypatch, start):
    h5py = pytest.importorskip("h5py", reason=INSTALL)
    images = torch.rand(8, 3)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(1, 3))
        file["labels"] = list(range(8))
    head = "import os\n\nimport h5py\nimport torch\nfrom torch.utils.data import Dataset\n\n\n"
    (tmp_path / "formats.py").write_text(head + blocks("data", "My data does not fit")[0], "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    from formats import HDF5

    data = HDF5(str(tmp_path / "data.h5"))
    if start == "fork":
        assert torch.equal(data[0][0], images[0])  # the file is open in this process, too
    loader = DataLoader(data, num_workers=2, multiprocessing_context=start)
    assert torch.equal(torch.cat([image for image, _ in loader]), images)


# ---------------------------------------------------------------- checkpoints


def test_a_resume_goes_on_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    save, load = blocks("saving", "After a resume the loss jumps up")
    monkeypatch.chdir(tmp_path)
    x = torch.rand(64, 4)

    def start():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def train(parts):
        for _ in range(3):
            parts["optimizer"].zero_grad()
            (parts["model"](x) - 1).square().mean().backward()
            parts["optimizer"].step()
        parts["scheduler"].step()

    first, second = start(), start()
    train(first)
    defined(save, **{**first, "model": SimpleNamespace(module=first["model"])}, epoch=0)
    assert defined(load, **second)["first_epoch"] == 1
    lost = start()
    lost["model"].load_state_dict(first["model"].state_dict())  # the model alone
    for parts in (first, second, lost):
        train(parts)
    assert torch.equal(first["model"].weight, second["model"].weight)
    assert not torch.equal(first["model"].weight, lost["model"].weight)


def test_a_checkpoint_of_several_gpus_on_one(tmp_path, monkeypatch):
    title = "How do I load a checkpoint from several GPUs"
    (code,), (convert,) = blocks("saving", title), blocks("saving", title, "bash")
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    monkeypatch.chdir(tmp_path)
    for wrapped in saved, nn.DataParallel(saved):  # whose keys have the prefix of DDP's
        for state in {"model": wrapped.state_dict()}, wrapped.state_dict():
            torch.save(state, "checkpoint.pt")
            nn.init.zeros_(model.weight)
            defined(code, model=model)
            assert torch.equal(model.weight, saved.weight)
    dcp.save({"model": model.state_dict()}, checkpoint_id="FOLDER", no_dist=True)
    nn.init.zeros_(saved.weight)
    finished(["bash", "-c", convert], tmp_path, ON_PATH)
    defined(code, model=saved)
    assert torch.equal(model.weight, saved.weight)


def test_types_that_are_allowed_are_loaded(tmp_path, monkeypatch):
    import argparse

    monkeypatch.chdir(tmp_path)
    own, numpy = blocks("saving", "`_pickle.UnpicklingError: Weights only")
    for code, saved in (own, argparse.Namespace(lr=0.1)), (numpy, np.random.get_state()):
        torch.save({"saved": saved}, "checkpoint.pt")
        with pytest.raises(Exception, match="Unsupported global"):
            torch.load("checkpoint.pt", weights_only=True)
        try:
            defined(code, argparse=argparse)
            assert torch.load("checkpoint.pt", weights_only=True)
        finally:
            torch.serialization.clear_safe_globals()


# ---------------------------------------------------------------- on two ranks

TWO_RANKS = """
import logging, os, sys, time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")

def say(*what):
    print(f"rank {rank}: {' '.join(map(str, what))}\\n", end="", flush=True)

def build_model():
    return nn.Linear(4, 2)

def shard(model):
    fully_shard(model)

if rank == 0:
    torch.save({"weight": torch.arange(8.0).view(2, 4), "bias": torch.ones(2)}, "model.pt")
"""


@pytest.mark.slow
def test_on_two_ranks(tmp_path):
    """Rank 0 alone reads the weights; it alone prints; and it alone opens a run of W&B."""
    for name in ("tqdm", "wandb"):
        pytest.importorskip(name, reason=INSTALL)
    parts = [
        TWO_RANKS,
        blocks("out_of_memory", "The machine's memory (RAM)")[1],
        "say('state', len(state), model.weight.full_tensor().sum().item())",
        "from tqdm import tqdm\nepoch, loss, loader, train = 0, 0.5, range(3), lambda batch: None",
        blocks("wrong_results", "Everything is printed once per GPU")[0],
        "import wandb\nloss = 0.5",
        blocks("wrong_results", "Each rank opens its own W&B run")[0],
        "say('folder', folder)\nrun and run.finish()\nlogging.getLogger().info('logged')",
        "dist.barrier()\ndist.destroy_process_group()",
    ]
    (tmp_path / "program.py").write_text("\n".join(parts), encoding="utf-8")
    env = {"WANDB_MODE": "offline"}
    env |= {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    job = finished(forked(tmp_path / "program.py"), tmp_path, env)
    one, two = said(job, 0), said(job, 1)
    assert (one[0], two[0]) == ("state 2 28.0", "state 0 28.0")
    assert one[1] == two[1]
    assert job.stdout.count("epoch 0: loss 0.5000") == 1
    assert job.stderr.count("INFO:root:logged") == 1
    assert job.stderr.count("3/3") == 1
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1
