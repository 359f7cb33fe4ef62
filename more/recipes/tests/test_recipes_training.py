"""Recipes about training: steps, precision, random numbers, speed, logs, metrics and devices."""

import json
import math
import re

import pytest
from changes import PROFILED, SENT, STEP, STEPS, TRAINED, printed_at_the_end, stop_on_rank_1
from patching import text_of
from pretended import SHIM
from running import ONE, TWO, same, same_but_for_rounding, saved
from support import gpus
from support.jobs import finished
from support.positions import BATCH
from support.results import accuracy, epochs, printed_by, same_bits, weights
from support.scripts import DOUBLE, SMALL, digest, forked, on_each_rank, write

pytestmark = pytest.mark.slow
WEIGHTS = digest("model.parameters()")


@pytest.mark.gpu
def test_accumulation(recipe, trained_with):
    """Groups of four batches (190 samples each), and a last group of 190, 190 and 11, are steps."""
    reduced = f"[kind for kind, _ in {SENT}].count('double') - 1"  # but for the loss
    changes = (*DOUBLE, PROFILED, printed_at_the_end(reduced))
    parts = recipe.ran(*changes, args=("1", "--batch-size=190", "--width=2"))
    whole = trained_with("05", changes, ("1", "--batch-size=760", "--width=2"))
    assert printed_by(parts, 0) == printed_by(whole, 0) == ["9"]
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
    last = printed_at_the_end("trainer.scheduler.get_last_lr()[0]")
    assert float(printed_by(recipe.ran(last, args=TWO), 0)[0]) == pytest.approx(0, abs=1e-9)


@pytest.mark.gpu
def test_bf16(recipe):
    """All ranks clip to the same norm; the weights stay in float32."""
    norm = "nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()"
    show = (STEP, f"        {on_each_rank(f'logits.dtype, {norm}')}{STEP}")
    job = recipe.ran(("max_norm=1.0", "max_norm=0.1"), show)
    assert printed_by(job, 0) == printed_by(job, 1)
    dtype, norm = printed_by(job, 0)[0].strip("()").split(", ")
    assert dtype == "torch.bfloat16"
    assert float(norm) == pytest.approx(0.1, rel=1e-4)
    assert {weight.dtype.itemsize for weight in weights(job).values()} == {4}


@pytest.mark.gpu
def test_fp16_scaler(recipe):
    """The gradient overflows once, on the last rank: all ranks skip only that step."""
    scale = "        self.scaler.scale(loss)"
    infinite = "(self.epochs_run, self.samples_run, dist.get_rank()) == (0, 1280, 1)"
    changes = (
        (scale, f"        loss = loss * (float('inf') if {infinite} else 1)\n{scale}"),
        ("GradScaler(device.type)", "GradScaler(device.type, init_scale=1024.0)"),
        ("            logits =", "            logits = self.logits ="),
        printed_at_the_end(f"trainer.logits.dtype, {WEIGHTS}"),
    )
    for job in recipe.with_and_without_a_stop(*changes):
        assert printed_by(job, 0)[-1] == printed_by(job, 1)[-1]
        assert printed_by(job, 0)[-1].startswith("(torch.float16, ")
        assert saved(job)["SCALER_STATE"]["scale"] == 512
        assert saved(job)["OPTIMIZER_STATE"]["state"][0]["step"] == STEPS - 1


def test_bitwise_resume(recipe, trained, tmp_path):
    """Four ranks, started again after an epoch; without the recipe the bits differ."""
    args = ("--batch-size=256", "--width=4")
    for number in "1", "2":
        again = recipe.at("again").ran(args=(number, *args), nprocs=4)
        step_5 = finished(forked("05", number, *args, nprocs=4), tmp_path)
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
    assert [printed_by(job, rank) for job in jobs for rank in (0, 1)] == [[f"{total}"]] * 4


@pytest.mark.gpu
def test_sync_batchnorm(recipe):
    """Only on GPUs, the ranks have equal statistics; those of rank 0 are saved and evaluated."""
    mean = "trainer.model.module[1].running_mean.tolist()"
    job = recipe.ran(printed_at_the_end(mean, TRAINED), printed_at_the_end(mean))
    (trained, evaluated), (other_trained, other_evaluated) = printed_by(job, 0), printed_by(job, 1)
    assert (trained == other_trained) == bool(gpus.count())
    assert trained == evaluated == other_evaluated == f"{weights(job)['1.running_mean'].tolist()}"


@pytest.mark.gpu
def test_compile(recipe, trained):
    """One graph for each of the two batch sizes; the weights are those of step 5."""
    eager = ("dynamic=False)", 'dynamic=False, backend="aot_eager")')
    graphs = printed_at_the_end("torch._dynamo.utils.counters['stats']['unique_graphs']")
    job = recipe.ran(eager, graphs, args=TWO)
    assert [printed_by(job, rank) for rank in (0, 1)] == [["2"], ["2"]]
    assert same_bits(job, trained("05", *TWO))


@pytest.mark.gpu
def test_early_stopping(recipe, trained):
    """From the third epoch on, rank 1 is always wrong, so the second is the best for both ranks."""
    line = "            _, score = evaluate("
    epoch = (line, f"            args.worse = self.epochs_run > 2 and dist.get_rank() == 1\n{line}")
    line = "    dist.all_reduce(correct)"
    worse = "    if getattr(args, 'worse', False):\n        correct.zero_()\n"
    changes = epoch, (line, worse + line)
    assert epochs(recipe.stopped(*changes, stop_on_rank_1(3), args=("9", *SMALL))) == [1, 2, 3]
    again = recipe.ran(*changes, args=("9", *SMALL))
    assert epochs(again) == [4, 5]
    assert same(saved(again, "checkpoint.pt.best"), weights(trained("05", *TWO)))
    assert accuracy(again)[2] == 179  # the half that did not choose


def test_log_wandb(recipe):
    """A run that is stopped in its second epoch and resumed has one ID, and no epoch twice."""
    folders = {f"WANDB_{name}_DIR": str(recipe.folder) for name in ("CACHE", "CONFIG", "DATA")}
    options = {"args": ("3", *SMALL), "env": {"WANDB_MODE": "offline", **folders}}
    jobs = recipe.stopped(stop_on_rank_1(1), **options), recipe.ran(**options)
    assert [epochs(job) for job in jobs] == [[1], [2, 3]]
    files = sorted(recipe.folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # which contains the ID
    # Behind its key stand the mark of a string in Protocol Buffers, its length, and the step.
    found = [re.findall(rb"_step\x82\x01\x01(.)", path.read_bytes()) for path in files]
    assert [sorted(set(steps)) for steps in found] == [[b"1"], [b"2", b"3"]]


@pytest.mark.gpu
def test_profiler(recipe):
    """Of three ranks, two are profiled: each writes a trace of three steps with an all-reduce."""
    recipe.ran(("range(8)", "range(2)"), nprocs=3)
    assert len([*recipe.folder.glob("trace-*")]) == 2
    for rank in 0, 1:
        trace = json.loads((recipe.folder / f"trace-{rank}.json").read_text("utf-8"))
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        steps = {name for name in names if name.startswith("ProfilerStep")}
        assert steps == {f"ProfilerStep#{number}" for number in (12, 13, 14)}
        assert names.count("gloo:all_reduce") == 3


# What torch.accelerator would say on a machine with the shim's GPUs. The optimizers of PyTorch ask
# torch.accelerator, too, so the answer is for the script only.
ANSWERS = {
    "torch.accelerator.is_available()": "True",
    "torch.accelerator.current_accelerator()": 'torch.device("cuda")',
    "torch.accelerator.set_device_index": "torch.cuda.set_device",
}


def test_any_accelerator(trained, tmp_path):
    """It uses the GPUs as step 5 does, without a word about CUDA in the script."""
    text = text_of("more/recipes/any_accelerator")
    assert "torch.cuda" not in text
    for question, answer in ANSWERS.items():
        text = text.replace(question, answer)
    path = write(tmp_path / "05_gather_eval.py", text)
    job = finished(forked(path, *ONE), tmp_path, SHIM)
    assert same_bits(job, trained("05", *ONE))
    for file in (tmp_path / ".calls").iterdir():
        first, second, *others = json.loads(file.read_text("utf-8"))
        _, backend, _, local_rank, gpu = second
        assert first[:2] == ["set_device", local_rank]
        assert (backend, gpu) == ("cpu:gloo,cuda:nccl", f"cuda:{local_rank}")
        assert ["DDP", "cuda"] in others
        assert ["pin_memory", gpu] in others
