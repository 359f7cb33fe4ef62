"""Tries the printed code of more/lookup/ on two ranks; each rank says what works, or why not.

`CODE` has the blocks of an entry under the name of a function below, which tries them; the
blocks under the name `others` are run one by one, with the names of `given`.
"""
# ruff: noqa: F401, the printed code uses what is imported

import argparse
import copy
import importlib
import itertools
import json
import logging
import math
import os
import re
import socket
import sys
import time
import traceback
import zipfile
from collections import OrderedDict
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # early: see more/pitfalls/late_import.md
from sklearn.metrics import roc_auc_score
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

CODE = json.loads(sys.argv[1])
if "adapters" in CODE:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig
device = torch.device("cpu")
GIVEN = dict(globals())  # to the printed code

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()


def run(code, **names):
    """Run printed code; return its names."""
    names = {**GIVEN, "__name__": "printed", **names}
    exec(compile(code, "printed", "exec"), names)
    return names


def same_on_both(tensor):
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.detach())
    return torch.equal(*both)


def accumulation(code):
    """Steps after four batches and after one, whose gradient is smaller."""
    torch.manual_seed(0)
    x, y = torch.rand(2, 5, 3, 4).double(), torch.rand(2, 5, 3, 1).double()
    plain, alone, criterion = nn.Linear(4, 1).double(), nn.Linear(4, 1).double(), nn.MSELoss()
    alone.load_state_dict(plain.state_dict())
    model, loader = DDP(plain), list(zip(x[rank], y[rank]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(code[0], model=model, loader=loader, optimizer=optimizer, criterion=criterion)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for part, share in ((slice(0, 4), 1), (slice(4, 5), 1 / 4)):
        (criterion(alone(x[:, part]), y[:, part]) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(plain.weight, alone.weight, atol=1e-12)


def tokens(code):
    """Ranks with different numbers of tokens, in two batches: the gradient of the whole mean."""
    mine = slice(0, 3) if rank == 0 else slice(3, 10)
    x, one, two = torch.arange(10.0)[:, None], nn.Linear(1, 1), nn.Linear(1, 1)
    two.load_state_dict(one.state_dict())
    micro_batches = list(zip(x[mine].chunk(2), torch.ones(10)[mine].chunk(2)))
    names = {"losses": lambda output: output.squeeze(1) ** 2, "micro_batches": micro_batches}
    run(code[0], model=DDP(one), **names)
    (two(x) ** 2).mean().backward()
    assert torch.allclose(one.weight.grad, two.weight.grad)


def clipped(code):
    """The norm is that of the whole gradient, also of a model that is sharded."""
    torch.manual_seed(0)
    start, x = nn.Linear(1, 1), torch.arange(10.0)[:, None]
    alone = copy.deepcopy(start)
    alone(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    fsdp1 = ["norm = model.clip_grad_norm_(1.0)"]  # printed within a sentence
    for wrap, lines in (DDP, code[:1]), (fully_shard, code), (FSDP, fsdp1):
        sharded = wrap(copy.deepcopy(start), **({"device_id": device} if wrap is FSDP else {}))
        sharded(x[5 * rank :][:5]).square().mean().backward()
        names = run("".join(lines), model=sharded)
        assert torch.allclose(torch.tensor(float(names.get("whole", names["norm"]))), norm), wrap


def evaluation(code):
    def evaluate(model, loader):
        samples = torch.cat([sample for (sample,) in loader])
        return samples.sum().item(), (samples > 4).sum().item(), len(samples)

    given = {"model": DDP(nn.Linear(1, 1)), "batch_size": 2, "evaluate": evaluate}
    names = run(code[0], test_set=TensorDataset(torch.arange(9.0)), **given)
    assert (names["loss"], names["accuracy"]) == (4, pytest.approx(4 / 9))
    mine = slice(0, 3) if rank == 0 else slice(3, 10)
    scores, labels = np.arange(10) * 7 % 10, np.arange(10) % 2
    names = run(code[1], scores=scores[mine], labels=labels[mine])
    score = roc_auc_score(names["labels"], names["scores"])
    assert rank == 1 or score == roc_auc_score(labels, scores)


def resume(code):
    """Two epochs, and one and one more, end with the same bits."""

    def train_one_epoch(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    data, found = TensorDataset(torch.rand(64, 4), torch.rand(64, 1)), []
    for epochs, new in (2, True), (1, True), (2, False):
        if new and rank == 0:
            Path("checkpoint.pt").unlink(missing_ok=True)
        dist.barrier()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epochs": epochs}
        loader = DataLoader(data, 8, sampler=DistributedSampler(data))
        start = run(code[0], loader=loader, train_one_epoch=train_one_epoch, **given)["start"]
        found.append((start, model.weight.clone()))
        dist.barrier()
    assert found[2][0] == 1
    assert torch.equal(found[0][1], found[2][1])


def stream(code):
    """Each sample is read once, and all ranks stop after as many steps."""

    class Stream(torch.utils.data.IterableDataset):
        __iter__ = run(code[0])["__iter__"]

        def read(self):
            return iter(range(101))

    for workers in (0, 2):
        loader, steps, both = DataLoader(Stream(), 4, num_workers=workers), [], [None, None]
        dist.all_gather_object(both, [sample for batch in loader for sample in batch.tolist()])
        assert sorted(both[0] + both[1]) == list(range(101))
        run(code[1], loader=loader, batches=12, train=steps.append)
        assert len(steps) == 12


def inference(code):
    """The parts that two ranks predict are put together in the order of the data set."""
    torch.manual_seed(0)
    samples, model = torch.rand(11, 3), nn.Linear(3, 2)
    run(code[0], dataset=samples, model=model)
    dist.barrier()
    with torch.inference_mode():
        assert torch.allclose(run(code[1], ranks=2)["predictions"], model(samples))


def archive(code):
    """Each worker reads from the archive, also after this process has read from it."""
    with zipfile.ZipFile(f"images-{rank}.zip", "w") as file:
        for number in range(40):
            file.writestr(f"images/{number}.jpg", bytes([number] * 9000))
    data = run(code[0], decode=lambda read: read[-1])["Zipped"](f"images-{rank}.zip")
    assert [data[0], *DataLoader(data, None, num_workers=2)] == [0, *range(40)]


# ---------------------------------------------------------------- models of Hugging Face


def build_llama():
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **size))


def adapters(code):
    """Only the adapters are trained, alike on both ranks, saved alone, and loaded again."""
    names = run(code[0], build_model=build_llama)
    model, tokens = names["model"], torch.full((1, 8), rank)
    assert all("lora_" in name for name, part in model.named_parameters() if part.requires_grad)
    model(input_ids=tokens, labels=tokens).loss.backward()
    names["optimizer"].step()
    assert all(same_on_both(weight) for weight in model.parameters())
    run(code[1], model=model)
    assert os.path.getsize("adapter/adapter_model.safetensors") < 20_000
    again = PeftModel.from_pretrained(build_llama(), "adapter")
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


# ---------------------------------------------------------------- all others: they run


def build_model(*_):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.Sequential(OrderedDict(layers=layers, fc=nn.Linear(4, 1)))


class Words(nn.Module):
    """A model of tokens, which FSDP1 keeps as flat pieces."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, tokens):
        return self.embed(tokens)


def given(code):
    """Return the names that pages use for what a reader has, new for each block."""
    torch.manual_seed(0)
    model, size = build_model(), 16 + 8 * rank  # ranks have different numbers of batches
    data = TensorDataset(torch.rand(size, 4), torch.rand(size, 1))
    code = re.sub("#.*", "", code)
    if "model.module" in code:
        model = DDP(model)
    if re.search(r"model\.forward|to_local", code) and "fully_shard(" not in code:
        fully_shard(model)
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    names = {"data": data, "dataset": data, "sampler": sampler, "criterion": nn.MSELoss(), **parts}
    names |= {"loader": DataLoader(data, 4, sampler=sampler), "batch_size": 4, "epochs": 2}
    names |= {"images": torch.rand(4, 4), "labels": torch.rand(4, 1), "x": torch.rand(4, 4)}
    names |= {"real": torch.rand(2, 4), "fake": torch.rand(2, 4), "tensor": torch.rand(2 + rank)}
    names |= {"layer": nn.Linear(4, 4), "output": torch.rand(4, 1), "batch": torch.rand(4, 4)}
    names |= {
        "loss": torch.tensor([1.0, torch.nan][rank]),
        "total": 8,
        "steps": 2,
        "seconds": 1.0,
        "epoch": 0,
    }
    names |= {"step": 0, "seed": 0, "correct": 1, "seen": 2, "batches": 2, "paths": ["a", "b"]}
    names |= dict.fromkeys(("train", "train_one_epoch", "evaluate", "save"), lambda *_: None)
    names |= {
        "state": build_model().state_dict(),
        "self": SimpleNamespace(),
        "local_rank": 0,
        "shard": fully_shard,
    }
    names |= {"build_model": build_model, "accumulated": 1, "loss_sum": 1.0, "samples": 2, "bad": 0}
    names["patience_is_over"] = lambda: rank == 1
    if "tokens" in code:
        model = FSDP(Words(), device_id=device, use_orig_params=True)
        names |= {"model": model, "tokens": torch.arange(8)}
    if "tqdm" in code:
        names["tqdm"] = importlib.import_module("tqdm").tqdm
    if "Accelerator(" in code:
        accelerate, transformers = map(importlib.import_module, ("accelerate", "transformers"))
        names["Accelerator"] = accelerate.Accelerator
        names["InitProcessGroupKwargs"] = accelerate.InitProcessGroupKwargs
        names["TrainingArguments"] = transformers.TrainingArguments
    if "wandb" in code:
        names["wandb"] = importlib.import_module("wandb")
    names["FSDP"] = partial(FSDP, device_id=device) if "FSDP(" in code else FSDP
    if 'checkpoint["' in code:
        names["checkpoint"] = {name: part.state_dict() for name, part in parts.items()}
    return names


def others(codes):
    """Run each block; what concerns GPUs alone is left out, or is of CPUs."""
    torch.save((torch.rand(4, 4), torch.rand(4, 1)), f"data-{rank}.pt")
    os.replace(f"data-{rank}.pt", "data.pt")
    failed = []
    for title, code in codes:
        dist.barrier()  # nobody reads the files of the block before
        if rank == 0:
            torch.save(build_model().state_dict(), "model.pt")
            torch.save(given('checkpoint["')["checkpoint"] | {"epochs": 1}, "checkpoint.pt")
        dist.barrier()
        text = re.sub(r"^( *)torch\.cuda\.set_device.*", r"\1pass", code, flags=re.MULTILINE)
        text = re.sub(r"^.*torch\.cuda\.memory.*", "", text, flags=re.MULTILINE)
        text = re.sub(r"torch\.cuda\.current_device\(\)", "0", text)
        text = re.sub(r'torch\.device\("cuda"[^)\]]*\]?\)*', "device", text)
        text = text.replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
        text = re.sub(r"(, |\()device_ids=\[\w+\]", "", text)
        if re.search(r"^( {0,4})(continue|break)", text, flags=re.MULTILINE) and "for " not in text:
            text = "for _ in range(1):\n" + re.sub("^", "    ", text, flags=re.MULTILINE)
        text = re.sub(r"dist\.(init|destroy)_process_group\(.*\)", "pass", text)
        try:
            names, ends = run(text, **given(text)), [None, None]
            agreed = [names[name] for name in ("epoch", "batches", "bad")]
            end = [float(it) for it in agreed if isinstance(it, (int, torch.Tensor))]
            dist.all_gather_object(ends, end)
            assert ends[0] == ends[1], ends  # on what both ranks have to agree
        except Exception:
            failed.append(f"{title}: {traceback.format_exc()}")
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    for name, code in CODE.items():
        try:
            globals()[name](code)
            said = "works"
        except Exception:
            said = traceback.format_exc().replace("\n", " | ")
        print(f"rank {rank}: {name}: {said}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()
