"""Recipes that change how the model is trained: steps, precision, random numbers, and speed."""

import math
import re

import pytest
from changes import PROFILED, SENT, STEP, STEPS, TRAINED, said_at_the_end
from patching import text_of
from running import ONE, TWO, same_but_for_rounding, saved
from support import gpus
from support.jobs import finished
from support.positions import BATCH
from support.results import resumed, said, same_bits, weights
from support.scripts import DOUBLE, digest, edited, exact, forked, on_each_rank

pytestmark = pytest.mark.slow
WEIGHTS = digest("model.parameters()")


@pytest.mark.gpu
def test_accumulation(recipe, trained_with):
    """A group of four batches acts as one large batch, and all-reduces once; so does a shorter one.

    A rank has 6471 samples: 8 full groups of 4 x 190, and a last one of 190, 190 and 11.
    """
    reduced = f"[kind for kind, _ in {SENT}].count('double') - 1"  # but for the loss
    changes = (*DOUBLE, PROFILED, said_at_the_end(reduced))
    parts = recipe.ran(*changes, args=("1", "--batch-size=190", "--width=2"))
    whole = trained_with("05", changes, ("1", "--batch-size=760", "--width=2"))
    assert said(parts, 0) == said(whole, 0) == ["9"]
    same_but_for_rounding(parts, whole)


@pytest.mark.gpu
def test_learning_rate(recipe):
    """The batch is half the one for which --lr was chosen."""
    rate = "        log(f'rate {self.optimizer.param_groups[0][\"lr\"]!r}')\n"
    wanted = [
        4e-3 * 0.5**0.5 * min(1, (n + 1) / 20) * (1 + math.cos(math.pi * n / STEPS)) / 2
        for n in range(STEPS)
    ]
    for job in recipe.with_and_without_a_stop((STEP, rate + STEP)):
        rates = [float(rate) for rate in re.findall("^rate (.+)$", job.stdout, re.MULTILINE)]
        assert rates == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    stop = f"            if self.epochs_run == 1:\n                stop_signals.append(1)\n{BATCH}"
    recipe.stopped((BATCH, stop), args=TWO, samples=640, nprocs=1)  # twice as many steps an epoch
    last = said_at_the_end("trainer.scheduler.get_last_lr()[0]")
    assert float(said(recipe.ran(last, args=TWO), 0)[0]) == pytest.approx(0, abs=1e-9)


@pytest.mark.gpu
def test_bf16(recipe):
    """All ranks clip to the same norm, and end with the same weights."""
    norm = "nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()"
    show = f"        if self.samples_run == 0:\n            {on_each_rank(f'logits.dtype, {norm}')}"
    smaller = ("max_norm=1.0", "max_norm=0.1")
    job = recipe.ran(smaller, (STEP, show + STEP), said_at_the_end(WEIGHTS))
    assert said(job, 0) == said(job, 1)
    dtype, norm = said(job, 0)[0].strip("()").split(", ")
    assert dtype == "torch.bfloat16"
    assert float(norm) == pytest.approx(0.1, rel=1e-4)
    assert {weight.dtype.itemsize for weight in weights(job).values()} == {4}


@pytest.mark.gpu
def test_fp16_scaler(recipe):
    """The gradient overflows once, on the last rank: all ranks skip only that step."""
    scale = "        self.scaler.scale(loss)"
    infinite = "(self.epochs_run, self.samples_run, dist.get_rank()) == (0, 1280, 1)"
    steps = "optimizer.state_dict()['state'][0]['step'].item()"
    small = "GradScaler(device.type, init_scale=1024.0)"  # never overflows by itself
    changes = (
        (scale, f"        loss = loss * (float('inf') if {infinite} else 1)\n{scale}"),
        ("GradScaler(device.type)", small),
        ("            logits =", "            logits = self.logits ="),
        said_at_the_end(f"trainer.logits.dtype, {steps}, {WEIGHTS}"),
    )
    for job in recipe.with_and_without_a_stop(*changes):
        assert said(job, 0)[-1] == said(job, 1)[-1]
        assert said(job, 0)[-1].startswith(f"(torch.float16, {STEPS - 1:.1f}, ")
        state = saved(job)["SCALER_STATE"]
        assert state["scale"] == 512
        assert state["_growth_tracker"] == STEPS - 11  # steps since the scale was halved


def test_bitwise_resume(recipe, trained, tmp_path):
    """Four ranks, started again after an epoch; without the recipe the bits differ."""
    args = ("--batch-size=256", "--width=4")
    assert text_of("recipes/bitwise_resume") == edited(tmp_path, "05", *exact(4)).read_text("utf-8")
    for epochs in "1", "2":
        step_5 = finished(forked("05", epochs, *args, nprocs=4), tmp_path)
        again = recipe.at("again").ran(args=(epochs, *args), nprocs=4)
        assert resumed(step_5) == resumed(again) == [1] * (epochs == "2")
    assert same_bits(again, recipe.at("undisturbed").ran(args=("2", *args), nprocs=4))
    assert not same_bits(step_5, trained("05", "2", *args, nprocs=4))


@pytest.mark.gpu
def test_ema(recipe):
    """The evaluated average is the same on all ranks and in the checkpoint."""
    start = "    model.eval()\n    for buffer"
    total = "sum(p.double().sum().item() for p in model.parameters())"
    jobs = recipe.with_and_without_a_stop((start, f"    {on_each_rank(total)}{start}"))
    average = saved(jobs[0])["AVERAGE_STATE"]
    assert average.pop("n_averaged") == STEPS
    total = sum(tensor.double().sum().item() for tensor in average.values())
    assert [said(job, rank) for job in jobs for rank in (0, 1)] == [[f"{total}"]] * 4


MEAN = said_at_the_end("trainer.model.module[1].running_mean.tolist()", TRAINED)


def test_sync_batchnorm_on_a_cpu(recipe):
    """Each rank has statistics of its own, and those of rank 0 are saved."""
    job = recipe.ran(MEAN)
    assert said(job, 0) == [f"{weights(job)['1.running_mean'].tolist()}"] != said(job, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not gpus.count(), reason="runs on GPUs: pytest --gpus")
def test_sync_batchnorm_on_gpus(recipe):
    """Each rank updates its statistics from the batches of all ranks."""
    job = recipe.ran(MEAN)
    assert len(said(job, 0)) == 1
    assert said(job, 0) == said(job, 1)


@pytest.mark.gpu
def test_compile(recipe, trained):
    """One graph for each of the two batch sizes; the weights are those of step 5."""
    eager = ("dynamic=False)", 'dynamic=False, backend="aot_eager")')
    graphs = said_at_the_end("torch._dynamo.utils.counters['stats']['unique_graphs']")
    job = recipe.ran(eager, graphs, args=TWO)
    assert [said(job, rank) for rank in (0, 1)] == [["2"], ["2"]]
    assert same_bits(job, trained("05", *TWO))


@pytest.mark.gpu
def test_activation_checkpointing(recipe, trained):
    assert same_bits(recipe.ran(), trained("05", *ONE))
