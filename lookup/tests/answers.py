"""Tries printed answers on two ranks; each rank says which of them work, or why not."""
# ruff: noqa: F401, the printed code uses what is imported

import copy
import json
import math
import os
import signal
import sys
import textwrap
import traceback
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # early: see pitfalls/late_import.md
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CODE = json.loads(sys.argv[1])  # {function below: [block of code]}
if "adapters" in CODE:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig
device = torch.device("cpu")
GIVEN = dict(globals())  # to the printed code

dist.init_process_group("gloo", timeout=timedelta(minutes=1))
rank = dist.get_rank()


def run(code, **names):
    """Run printed code; return its names."""
    names = {**GIVEN, **names}
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


def skip(code):
    """The loss of rank 1 is NaN in one step, and then, without the answer, all weights are."""
    for decide in code[0], "":
        torch.manual_seed(0)
        net, batches = nn.Linear(4, 1), torch.rand(6, 3, 4)
        batches[3] *= torch.nan if rank == 1 else 1
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        body = f"loss = model(x).square().mean()\n{decide}loss.backward()\noptimizer.step()\n"
        loop = "for x in batches:\n" + textwrap.indent(body, "    ")
        run(loop, batches=batches, model=DDP(net), optimizer=optimizer)
        assert net.weight.isfinite().all() == bool(decide)
        assert same_on_both(net.weight) == bool(decide)  # NaN is not equal to itself


def tokens(code):
    """Ranks with different numbers of samples: the gradient of the mean over all of them."""
    mine = slice(0, 3) if rank == 0 else slice(3, 10)
    x, one, two = torch.arange(10.0)[:, None], nn.Linear(1, 1), nn.Linear(1, 1)
    model = DDP(one)
    two.load_state_dict(one.state_dict())
    losses = model(x[mine]).squeeze() ** 2
    run(code[1], token_losses=losses, mask=torch.ones(10)[mine])["loss"].backward()
    (two(x) ** 2).mean().backward()
    assert torch.allclose(one.weight.grad, two.weight.grad)
    norm = nn.utils.clip_grad_norm_(two.parameters(), 1.0)
    *fsdp2, fsdp1 = code[2].splitlines()
    for wrap, lines in (DDP, fsdp2[:1]), (fully_shard, fsdp2), (FSDP, [fsdp1]):
        sharded = wrap(copy.deepcopy(one), **({"device_id": device} if wrap is FSDP else {}))
        sharded(x[5 * rank :][:5]).square().mean().backward()
        assert torch.allclose(run("\n".join(lines), model=sharded)["norm"], norm), wrap


def evaluation(code):
    names = run(code[0], loss_sum=2.0 + rank, correct=2 * rank, seen=4 + rank)
    assert (names["loss"], names["accuracy"]) == (pytest.approx(5 / 9), pytest.approx(2 / 9))
    mine = slice(0, 3) if rank == 0 else slice(3, 10)
    scores, labels = np.arange(10) * 7 % 10, np.arange(10) % 2
    guesses = torch.tensor(scores % 3 % 2)
    names = run(code[1], labels=torch.tensor(labels)[mine], predictions=guesses[mine], classes=2)
    assert names["f1"].numpy() == pytest.approx(f1_score(labels, guesses, average=None))
    names = run(code[2], scores=scores[mine], labels=labels[mine])
    score = roc_auc_score(names["labels"], names["scores"])
    assert rank == 1 or score == roc_auc_score(labels, scores)


def steps(code):
    """Five batches in groups of four are two steps, as in `accumulation`. The loss of rank 1 falls,
    the mean does not."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
    names = run(code[0], loader=range(5), accumulated=4, epochs=3, optimizer=optimizer)
    assert names["scheduler"].total_steps == 6
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        loss_sum, samples = (4.0 * (1 + epoch), 4) if rank == 0 else (2.0 - epoch, 1)
        run(code[1], scheduler=scheduler, loss_sum=loss_sum, samples=samples)
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def longest(code):
    """Rank 1 has three batches more than rank 0, and each keeps the outputs of its own."""
    for wrap in fully_shard, lambda module: FSDP(module, device_id=device):
        model, seen, loader = wrap(nn.Linear(4, 1)), [], list(torch.rand(2 + 3 * rank, 2, 4))
        with torch.no_grad():
            run(code[0], model=model, loader=loader, seen=seen)
        assert len(seen) == len(loader)


def resume(code):
    """Two epochs, and one and one more, end with the same bits."""

    def train_one_epoch(wrapped, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()

    def train(epochs):
        torch.manual_seed(0)
        data, model = TensorDataset(torch.rand(64, 4), torch.rand(64, 1)), nn.Linear(4, 1)
        loader = DataLoader(data, 8, sampler=DistributedSampler(data))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        names = {"model": model, "optimizer": optimizer, "loader": loader, "epochs": epochs}
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        names = run(code[0], train_one_epoch=train_one_epoch, scheduler=scheduler, **names)
        dist.barrier()
        return names["start"], model.weight.clone()

    _, whole = train(2)
    if rank == 0:
        os.remove("checkpoint.pt")
    dist.barrier()
    train(1)
    start, resumed = train(2)
    assert start == 1
    assert torch.equal(whole, resumed)


def export(code):
    example, batch = torch.rand(2, 4), torch.rand(5, 4)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()))
    run(code[0])["export"](model, example, "model.pt2")
    assert model.training
    assert model.module.training
    loaded = torch.export.load("model.pt2").module()
    assert torch.equal(loaded(batch), model.module.eval()(batch))
    for refused, *arguments in (
        (torch.export.export, model, (example,)),
        (torch.jit.trace, model, example),
        (torch.jit.script, model),
    ):
        with pytest.raises(Exception):  # noqa: B017
            refused(*arguments)


def stop(code):
    """Only rank 1 gets the signal, in its fourth step: both save before the eleventh."""
    saved = []

    def train(batch):
        if batch == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run(code[0], loader=range(30), epochs=3, train=train, save=lambda *at: saved.append(at))
    assert saved == [(0, 10)]


# ---------------------------------------------------------------- models of Hugging Face

TOKENS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))


def build_model():
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **size))


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def adapters(code):
    """Only the adapters are trained, alike on both ranks, saved alone, and loaded again."""
    names = run(code[0], build_model=build_model)
    model, optimizer = names["model"], names["optimizer"]
    assert all("lora_" in name for name, part in model.named_parameters() if part.requires_grad)
    before, mine = weights(model), TOKENS[rank:][:1]
    for _ in range(2):
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(weights(model), before)
    assert same_on_both(weights(model))
    run(code[1], model=model)
    assert os.path.getsize("adapter/adapter_model.safetensors") < 20_000
    again = PeftModel.from_pretrained(build_model(), "adapter")
    assert torch.equal(again(input_ids=mine).logits, model(input_ids=mine).logits)
    assert torch.equal(weights(build_model()), weights(again.unload()))


def sharded(code):
    """In bfloat16, a step of two ranks ends near to that of one in float32."""
    if rank == 0:
        build_model().save_pretrained("start")
    dist.barrier()
    names = run("\n".join(code))
    model, plain = names["sharded"]("start"), build_model()
    start = weights(plain)
    assert 2 * sum(part.to_local().numel() for part in model.parameters()) == start.numel()
    for each, batch in (model, TOKENS[rank:][:1]), (plain, TOKENS):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)  # moves by what the gradient is
        each(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    names["save"](model, "trained")
    trained = AutoModelForCausalLM.from_pretrained("trained", dtype=torch.float32)
    moved, missed = weights(plain) - start, weights(trained) - weights(plain)
    assert missed.norm() < moved.norm() / 50


def generated(code):
    """Rank 0 has the texts that one process generates, in their order."""
    prompts = list(torch.randint(64, (5, 1, 3), generator=torch.Generator().manual_seed(1)))
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens.tolist())))
    names = run(code[0], prompts=prompts, tokenizer=tokenizer, model=DDP(build_model()))
    options = {"max_new_tokens": 8, "do_sample": False}
    alone = (build_model().generate(each, **options)[0] for each in prompts)
    assert rank == 1 or names["hypotheses"] == list(map(tokenizer.decode, alone))


for name, code in CODE.items():
    try:
        globals()[name](code)
        said = "works"
    except Exception:
        said = traceback.format_exc().replace("\n", " | ")
    print(f"rank {rank}: {name}: {said}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
