"""Tries the printed code of more/lookup/ on two ranks: {name of a function below: its blocks}."""
# ruff: noqa: F401, the printed code uses what is imported

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import socket
import sys
import textwrap
import time
import warnings
import zipfile
from collections import OrderedDict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # early: see more/pitfalls/late_import.md
from sklearn.metrics import roc_auc_score
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
    import wandb
    from accelerate import Accelerator, InitProcessGroupKwargs
    from peft import LoraConfig, PeftModel, get_peft_model
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

device = torch.device("cpu")
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()


def run(code, title="printed", **names):
    """Run printed code; return its names."""
    names = {**globals(), "__name__": "printed", **names}
    exec(compile(code, title, "exec"), names)
    return names


def line():
    """Return a model; the gradient of the mean of its outputs is the mean of its inputs."""
    return nn.Linear(1, 1, bias=False)


def accumulation(code):
    """The optimizer steps after four batches, and after the one that is left."""
    x, model, gradients = torch.rand(2, 5, 3, 1), DDP(line()), []
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: gradients.append(model.module.weight.grad.item()))
    loader, names = list(zip(x[rank], x[rank])), {"criterion": lambda output, _: output.mean()}
    run(code[0], model=model, loader=loader, optimizer=optimizer, **names)
    assert gradients == pytest.approx([x[:, :4].mean().item(), x[:, 4].mean().item() / 4])


def tokens(code):
    """Ranks with different numbers of tokens, in two batches: the gradient of the whole mean."""
    x, model = torch.arange(10.0)[:, None], DDP(line())
    mine = (x[:3], x[3:])[rank]
    micro_batches = list(zip(mine.chunk(2), torch.ones_like(mine).chunk(2)))
    run(code[0], model=model, micro_batches=micro_batches, losses=lambda output: output)
    assert model.module.weight.grad.item() == pytest.approx(4.5)


class Both(nn.Module):
    """The sum of two layers' outputs."""

    def __init__(self, sparse):
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(1, 1, sparse=sparse) for _ in range(2))

    def forward(self, index):
        return sum(layer(index) for layer in self.layers)


def sparse(_):
    """DDP over gloo divides the gradients of two sparse layers too often. They should be 1."""
    for is_sparse in (False, True):
        model = DDP(Both(is_sparse))
        model(torch.tensor(0)).sum().backward()
        gradients = [layer.weight.grad.to_dense().item() for layer in model.module.layers]
        assert (gradients == [1, 1]) != is_sparse, gradients


def broadcast(_):
    """A backward pass through a broadcast causes a warning, unless no_grad() is around it."""
    for around, count in ((contextlib.nullcontext, 1), (torch.no_grad, 0)):
        sent = torch.ones(1, requires_grad=True) * 2
        with around():
            dist.broadcast(sent, 0)
        with warnings.catch_warnings(record=True) as caught:
            sent.backward()
        assert len(caught) == count, caught


def clipped(code):
    """The norm is that of the whole gradient, also of a model that is sharded."""
    x, fsdp1 = torch.arange(10.0)[5 * rank :][:5, None], partial(FSDP, device_id=device)
    in_a_sentence = ["norm = model.clip_grad_norm_(1.0)"]
    for wrap, lines in (DDP, code[:1]), (fully_shard, code), (fsdp1, in_a_sentence):
        model = wrap(line())
        model(x).mean().backward()
        names = run("".join(lines), model=model)
        assert float(names.get("whole", names["norm"])) == pytest.approx(4.5), wrap


def evaluation(code):
    names = {"evaluate": lambda _, loader: (2 * len(loader.dataset), 1, len(loader.dataset))}
    names |= {"model": DDP(line()), "batch_size": 2, "test_set": TensorDataset(torch.rand(9))}
    names = run(code[0], **names)
    assert names["totals"].tolist() == [18, 2, 9]
    assert (names["loss"], names["accuracy"]) == (2, pytest.approx(2 / 9))
    scores = np.arange(10)
    mine = (scores[:3], scores[3:])[rank]
    names = run(code[1], scores=mine, labels=mine > 4)
    assert rank == 1 or (names["scores"] == scores).all()


def resume(code):
    """Two epochs, and one and one more, end with the same bits."""

    def train_one_epoch(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    ended = []
    for start, epochs in (0, 2), (0, 1), (1, 2):
        if start == rank == 0:
            Path("checkpoint.pt").unlink(missing_ok=True)
        dist.barrier()
        names = given() | {"train_one_epoch": train_one_epoch, "epochs": epochs}
        assert run(code[0], **names)["start"] == start
        ended.append(names["model"].fc.weight)
        dist.barrier()
    assert torch.equal(ended[0], ended[2])


def told_to_stop(code):
    """One rank is told to stop, and both stop and save in the same step."""
    saved, trained = [], []

    def train(batch):
        trained.append(batch)
        if (rank, batch) == (1, 12):
            os.kill(os.getpid(), signal.SIGTERM)

    names = {"train": train, "save": lambda *where: saved.append(where), "loader": range(50)}
    with pytest.raises(SystemExit):
        run(code[0], **names)["run_epoch"](3)
    assert (saved, trained) == ([(3, 20)], [*range(20)])


def stopping(code):
    names = {"train_one_epoch": print, "patience_is_over": lambda: rank == 1}
    assert run(code[0], epochs=2, **names)["epoch"] == 0


def shortest(code):
    trained = []
    run(code[0], loader=range(4 + rank), train=trained.append)
    assert trained == [0, 1, 2, 3]


def skipped(code):
    inside = f"for _ in range(1):\n{textwrap.indent(code[0], '    ')}"
    assert run(inside, loss=torch.tensor([1.0, torch.nan][rank]))["bad"]


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


def build_llama():
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **size))


def adapters(code):
    """Only the adapters are trained, alike on both ranks, and loaded again."""
    names = run(code[0], build_model=build_llama)
    model, tokens = names["model"], torch.full((1, 8), rank)
    assert all("lora_" in name for name, part in model.named_parameters() if part.requires_grad)
    model(input_ids=tokens, labels=tokens).loss.backward()
    names["optimizer"].step()
    run(code[1], model=model)
    again = PeftModel.from_pretrained(build_llama(), "adapter")  # rank 0's
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


# ---------------------------------------------------------------- all others: they run

BEFORE = {  # part of the code: what its reader has done before
    "model.module.state_dict": "model = DDP(model)",
    "model.forward(": "fully_shard(model)",
    "summon_full_params": "model = FSDP(words, device_id=device, use_orig_params=True)",
    "mixed_precision": "FSDP = partial(FSDP, device_id=device)",
    'checkpoint["model"]': "checkpoint = {'model': state}",
    "checkpoint.pt.new": "state = {'model': state}",
    "pad_across_processes": "accelerator = Accelerator(cpu=True)",
    "training_args": "training_args = TrainingArguments('run', use_cpu=True)",
    "trainer.args": "trainer = SimpleNamespace(args=TrainingArguments('run', use_cpu=True))",
}


def build_model(*_):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.Sequential(OrderedDict(layers=layers, fc=nn.Linear(4, 1)))


def given():
    """Return the names that pages use for what a reader has, new for each block."""
    torch.manual_seed(0)
    model, layer, criterion = build_model(), nn.Linear(4, 4), nn.MSELoss()
    words = nn.Sequential(OrderedDict(embed=nn.Embedding(8, 4)))
    optimizer, state = torch.optim.AdamW(model.parameters()), build_model().state_dict()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    dataset = TensorDataset(torch.rand(64, 4), torch.rand(64, 1))
    data = SimpleNamespace(map=print) if "adapters" in CODE else dataset
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 4, sampler=sampler)
    train = train_one_epoch = evaluate = save = tokenize = lambda *_: None
    images = x = real = fake = tensor = out = torch.rand(4, 4 + rank)[:, :4]
    labels, tokens, paths = torch.rand(4, 1), torch.arange(8), ["a", "b"]
    epoch = step = steps = seed = local_rank = 0
    total, epochs, batch_size, accumulated, seconds = 8, 2, 4, 1, 1.0
    loss, loss_sum, samples, correct, seen = torch.tensor(1.0), 1.0, 2, 1, 2
    self, shard, tokenizer = SimpleNamespace(), fully_shard, SimpleNamespace(pad_token_id=0)
    return locals()


def others(blocks):
    """Run each block on the CPU, in the group that exists already."""
    dist.init_process_group = create_autospec(dist.init_process_group)
    dist.destroy_process_group = create_autospec(dist.destroy_process_group)
    torch.cuda.set_device = torch.cuda.current_device = lambda *_: 0
    names = given()
    if rank == 0:
        torch.save(names["state"], "model.pt")
        torch.save((names["images"], names["labels"]), "data.pt")
        parts = {name: names[name].state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save(parts, "checkpoint.pt")
    for title, code in blocks:
        dist.barrier()  # rank 1 does not read what rank 0 has yet to write
        before = [line for part, line in BEFORE.items() if part in code]
        run("\n".join([*before, code.replace('"cuda"', '"cpu"')]), title, **given())


for name, code in CODE.items():
    torch.manual_seed(0)
    globals()[name](code)
dist.barrier()
