"""Recipes that measure, show and log, and those about the machine: accelerators, unequal GPUs."""

import json
import re

import pytest
from changes import told
from patching import text_of
from pretended import SHIM
from running import ONE, TWO, same, saved
from support.jobs import finished
from support.results import accuracy, epochs, same_bits, weights
from support.scripts import SMALL, forked, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow
MANY = ("9", *SMALL)


@pytest.mark.gpu
def test_early_stopping(recipe, trained):
    """From the third epoch on, all answers of rank 1 are wrong, so the second is the best.

    The run is interrupted in the fourth epoch, and stops after three without improvement. By its
    own numbers alone, rank 0 would continue.
    """
    line = "            _, score = evaluate("
    epoch = (line, f"            args.worse = self.epochs_run > 2 and dist.get_rank() == 1\n{line}")
    line = "    dist.all_reduce(correct)"
    worse = "    if getattr(args, 'worse', False):\n        correct.zero_()\n"
    changes = epoch, (line, worse + line)
    assert epochs(recipe.stopped(*changes, told(3), args=MANY)) == [1, 2, 3]
    again = recipe.ran(*changes, args=MANY)
    assert epochs(again) == [4, 5]
    assert same(saved(again, "checkpoint.pt.best"), weights(trained("05", *TWO)))
    assert accuracy(again)[2] == 179  # the half that did not choose


def test_log_tensorboard(recipe):
    """Rank 0 is killed in the second epoch, after logging steps that the next run repeats."""
    line = "            loss = self._run_batch(source, targets)\n"
    killed = (
        line,
        "            if (dist.get_rank(), self.epochs_run, step) == (0, 1, 25):\n"
        f"                self.writer.flush()\n"
        f"                os.kill(os.getpid(), signal.SIGKILL)\n{line}",
    )
    recipe.ran(killed, args=TWO, code=1)
    recipe.ran(args=TWO)
    folder = recipe.folder / "checkpoint.pt.tensorboard"
    assert len(list(folder.iterdir())) == 2  # one file per run, written by rank 0
    shown = EventAccumulator(f"{folder}").Reload()
    batches = [epoch + 128 * step for epoch in (0, 12_942) for step in range(1, 102, 10)]
    assert [event.step for event in shown.Scalars("loss of a batch")] == batches
    assert [event.step for event in shown.Scalars("loss")] == [12_942, 2 * 12_942]


def logged(recipe, **env):
    """Stop a recipe in its second epoch, and start it again, for three in all."""
    args = ("3", *SMALL)
    jobs = recipe.stopped(told(1), args=args, env=env), recipe.ran(args=args, env=env)
    assert [epochs(job) for job in jobs] == [[1], [2, 3]]


def test_log_wandb(recipe):
    """Rank 0 alone logs, under one ID, and no epoch twice."""
    folders = {f"WANDB_{name}_DIR": str(recipe.folder) for name in ("CACHE", "CONFIG", "DATA")}
    logged(recipe, WANDB_MODE="offline", **folders)
    files = sorted(recipe.folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # which contains the ID
    # Behind its key stand the mark of a string in Protocol Buffers, its length, and the step.
    found = [re.findall(rb"_step\x82\x01\x01(.)", path.read_bytes()) for path in files]
    assert [sorted(set(steps)) for steps in found] == [[b"1"], [b"2", b"3"]]


@pytest.mark.gpu
def test_profiler(recipe):
    """Of three ranks, two are profiled: each writes a trace of three steps with an all-reduce."""
    recipe.ran(("range(8)", "range(2)"), nprocs=3)
    traces = sorted(recipe.folder.glob("trace-*"))
    assert [path.name for path in traces] == ["trace-0.json", "trace-1.json"]
    for rank, path in enumerate(traces):
        trace = json.loads(path.read_text("utf-8"))
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        assert {f"ProfilerStep#{n}" for n in range(12, 15)} <= {*names}
        assert not {"ProfilerStep#11", "ProfilerStep#15"} & {*names}
        assert names.count("gloo:all_reduce") == 3
        assert names.count("DistributedDataParallel.forward") == 3


@pytest.mark.gpu
def test_eval_torchmetrics(recipe, trained):
    """The same number as in step 5, from 180 samples on rank 0 and 179 on rank 1."""
    job = recipe.ran()
    assert accuracy(job) == accuracy(trained("05", *ONE))


# What torch.accelerator would say on a machine with the shim's GPUs. The optimizers of PyTorch ask
# torch.accelerator, too, so the answer is for the script only.
ANSWERS = {
    "torch.accelerator.is_available()": "True",
    "torch.accelerator.current_accelerator()": 'torch.device("cuda")',
    "torch.accelerator.set_device_index": "torch.cuda.set_device",
}


def test_any_accelerator(trained, tmp_path):
    """It uses the GPUs as step 5 does, without a word about CUDA in the script."""
    text = text_of("recipes/any_accelerator")
    assert "torch.cuda" not in text
    for question, answer in ANSWERS.items():
        text = text.replace(question, answer)
    path = write(tmp_path / "05_gather_eval.py", text)
    job = finished(forked(path, *ONE), tmp_path, SHIM)
    assert same_bits(job, trained("05", *ONE))
    calls = [json.loads(file.read_text("utf-8")) for file in (tmp_path / ".calls").iterdir()]
    for rank, (first, second, *others) in enumerate(sorted(calls)):
        assert first == ["set_device", rank, str(rank)]
        assert second[:2] == ["init_process_group", "cpu:gloo,cuda:nccl"]
        assert ["DDP", "cuda"] in others
        assert ["pin_memory", f"cuda:{rank}"] in others
