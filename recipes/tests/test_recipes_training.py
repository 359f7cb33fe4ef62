"""Recipes that change how the model is trained: steps, precision, random numbers, and speed."""

import math
import re
from functools import partial

import pytest
import torch
from patching import on_screen, text_of
from running import (
    HOOKED,
    ONE,
    SENT,
    STEP,
    STEPS,
    TRAIN,
    TWO,
    difference,
    module,
    printed,
    ran,
    refused,
    said_at_the_end,
    same,
    saved,
    script,
    with_and_without_a_stop,
)
from support.gpus import GPUS, ON_GPUS
from support.jobs import finished
from support.positions import BATCH
from support.results import resumed, said, same_bits, weights
from support.scripts import (
    DOUBLE,
    SMALL,
    command,
    digest,
    edited,
    exact,
    forked,
    load,
    on_each_rank,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint_sequential

SLOW = pytest.mark.slow


@SLOW
def test_accumulation(trained_with, tmp_path):
    """A group of four batches acts as one large batch, and all-reduces once; so does a shorter one.

    A rank has 6471 samples: 32 full groups of 4 x 50, and a last one of 50 and 21.
    """
    count = said_at_the_end("sum(size > 2 for _, size in SENT)")
    changes = (*DOUBLE, SENT, (TRAIN, HOOKED), count)
    parts = ran(tmp_path, "accumulation", *changes, args=("1", "--batch-size=50", "--width=2"))
    whole = trained_with("05", changes, ("1", "--batch-size=200", "--width=2"))
    assert said(parts, 0) == said(whole, 0) == ["33"]
    assert difference(parts, whole) < 1e-9


@SLOW
def test_learning_rate(tmp_path):
    """The batch is half the one for which --lr was chosen."""
    rate = "        log(f'rate {self.optimizer.param_groups[0][\"lr\"]!r}')\n"
    wanted = [
        4e-3 * 0.5**0.5 * min(1, (n + 1) / 20) * (1 + math.cos(math.pi * n / STEPS)) / 2
        for n in range(STEPS)
    ]
    for job in with_and_without_a_stop(tmp_path, "learning_rate", (STEP, rate + STEP)):
        rates = [float(rate) for rate in printed("rate (.+)", job)]
        assert rates == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@SLOW
def test_bf16(tmp_path):
    """All ranks compute the same norm, clip to the same gradient, and end with the same weights."""
    clip = "        nn.utils.clip_grad_norm_("
    gradients = "[p.grad for p in self.model.parameters()]"
    clipped = f"nn.utils.get_total_norm({gradients}).item()"
    show = on_each_rank(f"logits.dtype, norm.item(), {clipped}, {digest(gradients)}")
    changes = (
        ("MAX_NORM = 1.0", "MAX_NORM = 0.1"),
        (clip, clip.replace("nn", "norm = nn", 1)),
        (STEP, f"        if self.samples_run == 0:\n            {show}{STEP}"),
        said_at_the_end(digest("model.parameters()")),
    )
    job = ran(tmp_path, "bf16", *changes)
    assert len(said(job, 0)) == 2
    assert said(job, 0) == said(job, 1)
    dtype, norm, clipped, _ = said(job, 0)[0].strip("()").split(", ")
    assert dtype == "torch.bfloat16"
    assert float(norm) > 0.15
    assert float(clipped) == pytest.approx(0.1, rel=1e-4)
    assert {weight.dtype for weight in weights(job).values()} == {torch.float32}


@SLOW
def test_fp16_scaler(tmp_path):
    """The gradient overflows once, on the last rank: all ranks skip only that step."""
    scale = "        self.scaler.scale(loss)"
    infinite = "(self.epochs_run, self.samples_run, dist.get_rank()) == (0, 1280, 1)"
    steps = "optimizer.state_dict()['state'][0]['step'].item()"
    small = "GradScaler(device.type, init_scale=1024.0)"  # never overflows by itself
    changes = (
        (scale, f"        loss = loss * (float('inf') if {infinite} else 1)\n{scale}"),
        ("GradScaler(device.type)", small),
        ("            logits =", "            logits = self.logits ="),
        said_at_the_end(f"trainer.logits.dtype, {steps}, {digest('model.parameters()')}"),
    )
    for job in with_and_without_a_stop(tmp_path, "fp16_scaler", *changes):
        assert said(job, 0)[-1] == said(job, 1)[-1]
        assert said(job, 0)[-1].startswith(f"(torch.float16, {STEPS - 1:.1f}, ")
        state = saved(job, "SCALER_STATE")
        assert state["scale"] == 512
        assert state["_growth_tracker"] == STEPS - 11  # steps since the scale was halved


# ---------------------------------------------------------------- random numbers

NOISY = """class Noisy(TensorDataset):
    def __getitem__(self, index):
        scan, label = super().__getitem__(index)
        return scan + 0.1 * torch.randn_like(scan), label


def load_datasets():
"""
# At the first step of an epoch or after a resume, each rank prints its generator's state.
SHOW_STATE = on_each_rank(digest("[torch.get_rng_state()]"))
RANDOM = (
    ("def load_datasets():\n", NOISY),
    ("return TensorDataset(shifted", "return Noisy(shifted"),
    ("nn.Flatten()]", "nn.Flatten(), nn.Dropout(0.2)]"),
    (BATCH, f"            if step == 0:\n                {SHOW_STATE}{BATCH}"),
)


@SLOW
def test_bitwise_resume(trained, tmp_path):
    """Four ranks, started again after an epoch; without the recipe the bits differ."""
    args, more = ("1", "--batch-size=256", "--width=4"), ("2", "--batch-size=256", "--width=4")
    assert text_of("recipes/bitwise_resume") == edited(tmp_path, "05", *exact(4)).read_text("utf-8")
    ran(tmp_path / "again", "bitwise_resume", args=args, nprocs=4)
    again = ran(tmp_path / "again", "bitwise_resume", args=more, nprocs=4)
    assert resumed(again) == [1]
    assert same_bits(again, ran(tmp_path / "undisturbed", "bitwise_resume", args=more, nprocs=4))
    step_5 = finished(forked(edited(tmp_path, "05"), *args, nprocs=4), tmp_path)
    step_5 = finished(forked(step_5.cwd / "05_gather_eval.py", *more, nprocs=4), tmp_path)
    assert not same_bits(step_5, trained("05", *more, nprocs=4))


@SLOW
def test_randomness(tmp_path):
    """With dropout, and with augmentation in the training process."""
    stopped, undisturbed = with_and_without_a_stop(tmp_path, "randomness", *RANDOM)
    assert said(undisturbed, 0) != said(undisturbed, 1)
    assert said(stopped, 0)[:1] == said(undisturbed, 0)
    assert len({*said(stopped, 0), *said(stopped, 1)}) == 4


@SLOW
def test_ema(tmp_path):
    """The evaluated average is the same on all ranks and in the checkpoint."""
    start = "    model.eval()\n    for buffer"
    total = "sum(p.double().sum().item() for p in model.parameters())"
    show = on_each_rank(f"{digest('model.parameters()')}, {total}")
    jobs = with_and_without_a_stop(tmp_path, "ema", (start, f"    {show}{start}"))
    one, other = averages = [saved(job, "AVERAGE_STATE") for job in jobs]
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(state.pop("n_averaged") == STEPS for state in averages)
    (evaluated,) = {line for job in jobs for rank in (0, 1) for line in said(job, rank)}
    total = sum(tensor.double().sum().item() for tensor in one.values())
    assert float(evaluated.strip("()").split(", ")[1]) == total


# ---------------------------------------------------------------- BatchNorm


@SLOW
def test_batchnorm_without_sync(tmp_path):
    """On a CPU, each forward pass starts with rank 0's statistics; each rank updates its own."""
    means = f"""\
    before, after = [], []
    norm = model[1]
    norm.register_forward_pre_hook(lambda *_: before.append(norm.running_mean.tolist()))
    norm.register_forward_hook(lambda *_: after.append(norm.running_mean.tolist()))
{TRAIN}"""
    evaluated = "    if not trainer.interrupted:\n"
    show = (evaluated, f"    {on_each_rank('[before, after]')}{evaluated}")
    job = ran(tmp_path, "sync_batchnorm", (TRAIN, means), show)
    (before, after), (also_before, others) = (eval(said(job, rank)[0]) for rank in (0, 1))
    assert len(before) == STEPS
    assert before == also_before
    assert before[1:] == after[:-1]
    assert all(mean != other for mean, other in zip(after, others))
    assert weights(job)["1.running_mean"].tolist() == after[-1]


@SLOW
def test_sync_batchnorm_on_a_cpu(tmp_path):
    refused(tmp_path, "sync_batchnorm", ('if device.type == "cuda":', "if True:"))


def test_converted_batchnorm_on_a_cpu(process_group):
    """It keeps its names and weights, evaluates to the same result, and cannot train."""
    plain = module("sync_batchnorm").build_model(4)
    plain(torch.rand(16, 1, 8, 8))  # moves the statistics away from 0 and 1
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected = plain.eval()(torch.ones(1, 1, 8, 8))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert same(dict(converted.state_dict()), state)
    assert torch.equal(converted(torch.ones(1, 1, 8, 8)), expected)
    with pytest.raises(ValueError, match=on_screen("recipes/sync_batchnorm")[1]):
        converted.train()(torch.ones(2, 1, 8, 8))


@pytest.mark.parametrize("nprocs", [pytest.param(2, id="nccl-2")])
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_sync_batchnorm_on_gpus(tmp_path, nprocs):
    """Each rank updates its statistics from the batches of all ranks."""
    mean = on_each_rank("trainer.model.module[1].running_mean.tolist()")
    evaluated = "    if not trainer.interrupted:\n"
    path = script(tmp_path, "sync_batchnorm", (evaluated, f"    {mean}{evaluated}"))
    job = finished(command(path, "1", *SMALL, nprocs=nprocs), tmp_path, ON_GPUS)
    assert len(said(job, 0)) == 1
    assert said(job, 0) == said(job, 1)


@SLOW
def test_compile(trained, tmp_path):
    """One graph for each of the two batch sizes; the weights are those of step 5."""
    eager = ("dynamic=False)", 'dynamic=False, backend="aot_eager")')
    graphs = said_at_the_end("torch._dynamo.utils.counters['stats']['unique_graphs']")
    job = ran(tmp_path, "compile", eager, graphs, args=TWO)
    assert [said(job, rank) for rank in (0, 1)] == [["2"], ["2"]]
    assert same_bits(job, trained("05", *TWO))


def test_a_checkpoint_of_the_compiled_model():
    model = load("05").build_model(1)
    state = torch.compile(model).state_dict()
    with pytest.raises(RuntimeError, match=re.escape(on_screen("recipes/compile")[0])):
        model.load_state_dict(state)


class Own(nn.Sequential):
    def forward(self, images):
        for layer in self:
            images = layer(images)
        return images


SINCE_2_14 = 3 if torch.__version__ >= "2.14" else 0


@SLOW
@pytest.mark.parametrize("kind, parts", [(nn.Sequential, [3, 0, SINCE_2_14]), (Own, [3, 3, 3])])
def test_what_compiles_a_sequential(process_group, kind, parts):
    """Count the parts in which it is compiled before DDP, after DDP, and in place before DDP.

    The gradients fill three of DDP's buckets.
    """
    found = []
    backend = {"backend": lambda graph, _: found.append(graph) or graph}
    wrapped = partial(DDP, bucket_cap_mb=2)
    ways = (
        lambda model: wrapped(torch.compile(model, **backend)),
        lambda model: torch.compile(wrapped(model), **backend),
        lambda model: wrapped(model.compile(**backend) or model),
    )
    for make, wanted in zip(ways, parts, strict=True):
        torch.compiler.reset()
        found.clear()
        make(kind(*load("05").build_model(256)))(torch.ones(2, 1, 8, 8))
        assert len(found) == wanted


@SLOW
def test_activation_checkpointing(trained, tmp_path):
    assert same_bits(ran(tmp_path, "activation_checkpointing"), trained("05", *ONE))


def test_activation_checkpointing_keeps_less():
    """Count the bytes that forward() keeps for backward()."""
    found = []
    for one in load("05"), module("activation_checkpointing"):
        sizes = []
        keep = lambda tensor: sizes.append(tensor.nbytes) or tensor  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            one.build_model(32)(torch.ones(16, 1, 8, 8))
        found.append(sum(sizes))
    assert found[1] < 0.5 * found[0]


class Reentrant(nn.Sequential):
    def forward(self, images):
        return checkpoint_sequential(self, 3, images, use_reentrant=True)


def test_reentrant_checkpointing(process_group):
    warning, error = on_screen("recipes/activation_checkpointing")
    model = DDP(Reentrant(*load("05").build_model(1)))
    with pytest.warns(UserWarning, match=re.escape(warning)):
        model(torch.ones(2, 1, 8, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=re.escape(error)):
        model(torch.ones(2, 1, 8, 8))
