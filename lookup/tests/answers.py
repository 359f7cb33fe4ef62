"""Runs the printed answers to many questions on two ranks, and says what each of them did."""

import copy
import json
import math
import os
import signal
import sys
import traceback
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # early: see pitfalls/late_import.md
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CODE = json.loads(sys.argv[1])  # {question: [block of code]}
dist.init_process_group("gloo")
rank, device, world_size = dist.get_rank(), torch.device("cpu"), 2
NAMES = {"torch": torch, "dist": dist, "nn": nn, "DDP": DDP, "np": np, "os": os, "device": device}


def say(name, *what):
    print(f"rank {rank}: {name}: {' '.join(map(str, what))}\n", end="", flush=True)


def run(code, **names):
    """Run printed code; return its names."""
    names = {**NAMES, **names}
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
    names = {"model": model, "loader": loader, "optimizer": optimizer, "criterion": criterion}
    run(code[0], nullcontext=nullcontext, **names)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for part, share in ((slice(0, 4), 1), (slice(4, 5), 1 / 4)):
        (criterion(alone(x[:, part]), y[:, part]) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.allclose(plain.weight, alone.weight, atol=1e-12)


def skip(code):
    """The loss of rank 1 is NaN in one step; the answer is run, and what it warns of."""
    alone = "bad = [not loss.isfinite().item()]\ndist.broadcast_object_list(bad, src=0)\n"
    alone += "if bad[0]:\n    continue\n"
    for decide in code[0], alone:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        model, optimizer = DDP(net), torch.optim.SGD(net.parameters(), lr=0.1)
        body = decide + "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        loop = "for x in batches:\n    loss = model(x).square().mean()\n" + lines
        batches = torch.rand(6, 3, 4)
        batches[3] *= torch.nan if rank == 1 else 1
        run(loop, batches=batches, model=model, optimizer=optimizer)
        yield net.weight.isfinite().all().item() and same_on_both(net.weight)


def tokens(code):
    """Ranks with different numbers of samples: the gradient of the mean over all of them."""
    mine = slice(0, 3) if rank == 0 else slice(3, 10)
    x, one, two = torch.arange(10.0)[:, None], nn.Linear(1, 1), nn.Linear(1, 1)
    model = DDP(one)
    two.load_state_dict(one.state_dict())
    losses = model(x[mine]).squeeze() ** 2
    run(code[1], token_losses=losses, mask=torch.ones(10)[mine])["loss"].backward()
    (two(x) ** 2).mean().backward()
    yield torch.allclose(one.weight.grad, two.weight.grad)
    norm = nn.utils.clip_grad_norm_(two.parameters(), 1.0)
    *fsdp2, fsdp1 = code[2].splitlines()
    for wrap, lines in (DDP, fsdp2[:1]), (fully_shard, fsdp2), (FSDP, [fsdp1]):
        sharded = wrap(copy.deepcopy(one), **({"device_id": device} if wrap is FSDP else {}))
        sharded(x[5 * rank :][:5]).square().mean().backward()
        yield torch.allclose(run("\n".join(lines), model=sharded)["norm"], norm)


def evaluation(code):
    names = {"loss_sum": 2.0 + rank, "correct": 2 * rank, "seen": 4 + rank}
    names = run(code[0], **names)
    yield f"{names['loss']:.4f} {names['accuracy']:.4f}"
    mine = slice(0, 3) if rank == 0 else slice(3, 10)
    scores, labels = np.arange(10) * 7 % 10, np.arange(10) % 2
    names = run(code[1], scores=scores[mine], labels=labels[mine], roc_auc_score=roc_auc_score)
    yield rank == 1 or roc_auc_score(names["labels"], names["scores"]) == roc_auc_score(
        labels, scores
    )


def steps(code):
    """Five batches in groups of four are two steps, as in `accumulation`. The loss of rank 1 falls,
    the mean does not."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
    names = {"loader": range(5), "accumulated": 4, "epochs": 3, "optimizer": optimizer}
    names = run(code[0], math=math, OneCycleLR=lr_scheduler.OneCycleLR, **names)
    yield names["scheduler"].total_steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        loss_sum, samples = (4.0 * (1 + epoch), 4) if rank == 0 else (2.0 - epoch, 1)
        run(code[1], scheduler=scheduler, loss_sum=loss_sum, samples=samples)
    yield round(scheduler.get_last_lr()[0], 6)


def resume(code):
    """Two epochs, and one and one more, end with the same bits."""

    def train(epochs):
        torch.manual_seed(0)
        data = TensorDataset(torch.rand(64, 4), torch.rand(64, 1))
        loader = DataLoader(data, 8, sampler=DistributedSampler(data))
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

        def train_one_epoch(wrapped, loader, optimizer):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()

        names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        names = run(code[0], train_one_epoch=train_one_epoch, epochs=epochs, **names)
        dist.barrier()
        return names["start"], model.weight.clone()

    _, whole = train(2)
    if rank == 0:
        os.remove("checkpoint.pt")
    dist.barrier()
    train(1)
    start, resumed = train(2)
    return start == 1 and torch.equal(whole, resumed)


def export(code):
    example, batch = torch.rand(2, 4), torch.rand(5, 4)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()))
    run(code[0])["export"](model, example, "model.pt2")
    loaded = torch.export.load("model.pt2").module()
    training = model.training and model.module.training
    yield training and torch.equal(loaded(batch), model.module.eval()(batch))
    for refused in (
        lambda: torch.export.export(model, (example,)),
        lambda: torch.jit.trace(model, example),
        lambda: torch.jit.script(model),
    ):
        try:
            refused()
            yield "accepted"
        except Exception:
            yield "refused"


def stop(code):
    """Only rank 1 gets the signal, in its fourth step: both save before the eleventh."""
    saved = []

    def train(batch):
        if batch == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    names = {"loader": range(30), "epochs": 3, "train": train}
    run(code[0], signal=signal, save=lambda *at: saved.append(at), **names)
    return saved


for question, answer in {
    "How do I accumulate gradients": accumulation,
    "How do I skip a bad batch": skip,
    "Are gradients, and the loss, summed": tokens,
    "How do I evaluate: validation loss": evaluation,
    "How many steps has an epoch": steps,
    "How do I save and resume": resume,
    "How do I export to ONNX": export,
    "How do I save before the Slurm time limit": stop,
}.items():
    try:
        done = answer(CODE[question])
        say(question, *(done if hasattr(done, "send") else [done]))
    except Exception:
        say(question, traceback.format_exc().replace("\n", " | "))
dist.barrier()
dist.destroy_process_group()
