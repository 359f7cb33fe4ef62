"""Recipes about the machine: other accelerators, unequal GPUs, profiles, and many runs."""

import json
import re

import pytest
import torch
from pretended import SHIM
from support.jobs import finished
from support.positions import stopped, told
from support.results import accuracy, said, same_bits, weights
from support.scripts import (
    DOUBLE,
    SMALL,
    edited,
    forked,
    on_each_rank,
    page,
    patched,
    text_of,
    write,
)

SLOW = pytest.mark.slow
# What torch.accelerator would say on a machine with the shim's GPUs. The optimizers of PyTorch ask
# torch.accelerator, too, so the answer is for the script only.
ACCELERATOR = """\
from types import SimpleNamespace

accelerator = SimpleNamespace(
    is_available=lambda: True,
    current_accelerator=lambda: torch.device("cuda"),
    set_device_index=torch.cuda.set_device,
)
"""


@SLOW
def test_any_accelerator(trained, tmp_path):
    """It uses the GPUs as step 5 does, without a word about CUDA in the script."""
    text = text_of("recipes/any_accelerator")
    assert "torch.cuda" not in text
    head, mark, rest = text.partition("told_to_stop = ")
    rest = rest.replace("torch.accelerator.", "accelerator.")
    path = write(tmp_path / "05_gather_eval.py", head + ACCELERATOR + mark + rest)
    job = finished(forked(path, "1", *SMALL), tmp_path, SHIM)
    assert same_bits(job, trained("05", "1", *SMALL))
    calls = [json.loads(file.read_text("utf-8")) for file in (tmp_path / ".calls").iterdir()]
    for rank, (first, second, *others) in enumerate(sorted(calls)):
        assert first == ["set_device", rank, str(rank)]
        assert second == ["init_process_group", "cpu:gloo,cuda:nccl", rank, rank]
        assert ["DDP", "cuda"] in others
        assert ["pin_memory", f"cuda:{rank}"] in others


@SLOW
def test_unequal_gpus(tmp_path):
    """Of each 128 samples, rank 0 gets 96 and rank 1 gets 32: step 5's steps, with 64 each.

    So that no batch is incomplete, and none is padded, there are 1280 samples.
    """
    line = "    return TensorDataset(shifted, labels[train].repeat(9)), "
    few = (
        line,
        line.replace("shifted, labels[train].repeat(9)", "shifted[:1280], labels[train][:1280]"),
    )
    line = "            total[1] += len(targets)\n"
    counted = (line, f"{line}            {on_each_rank('len(targets)')}")
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    unequal = patched(one, "recipes/unequal_gpus", few, counted, *DOUBLE)
    job = finished(forked(unequal, "2", *SMALL), one)
    assert [said(job, rank) for rank in (0, 1)] == [["96"] * 20, ["32"] * 20]
    equal = finished(forked(edited(other, "05", few, *DOUBLE), "2", *SMALL), other)
    ours, step_5 = weights(job), weights(equal)
    for name, weight in step_5.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-9)


@SLOW
def test_profiler(tmp_path):
    """Of three ranks, two are profiled: each writes a trace of three steps with an all-reduce."""
    path = patched(tmp_path, "recipes/profiler", ("range(8)", "range(2)"))
    finished(forked(path, "1", *SMALL, nprocs=3), tmp_path)
    assert sorted(trace.name for trace in tmp_path.glob("trace-*")) == [
        "trace-0.json",
        "trace-1.json",
    ]
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"trace-{rank}.json").read_text("utf-8"))
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        steps = sorted({name for name in names if name.startswith("ProfilerStep")})
        assert steps == ["ProfilerStep#12", "ProfilerStep#13", "ProfilerStep#14"]
        for name in ("gloo:all_reduce", "DistributedDataParallel.forward"):
            assert names.count(name) == 3


@SLOW
def test_sweep(tmp_path):
    """A run that is stopped continues its trial; both ranks train with its learning rate."""
    optuna = pytest.importorskip("optuna", reason="pip install -r requirements-dev.txt")
    from optuna.storages import journal

    line = "    trainer.train(args.total_epochs"
    drawn = (line, f"    {on_each_rank('args.lr')}{line}")
    stopped(patched(tmp_path, "recipes/sweep", told(0)), "1", *SMALL)
    storage = journal.JournalStorage(journal.JournalFileBackend(str(tmp_path / "sweep.journal")))
    study = optuna.load_study(storage=storage, study_name="digits")
    (before,) = study.trials
    job = finished(forked(patched(tmp_path, "recipes/sweep", drawn), "1", *SMALL), tmp_path)
    assert "resuming from " in job.stdout
    (trial,) = study.trials
    assert (before.state.name, trial.state.name) == ("RUNNING", "COMPLETE")
    assert said(job, 0) == said(job, 1) == [str(trial.params["lr"])]
    _, correct, total = accuracy(job)
    assert total == 180  # the half that may choose
    assert trial.value == pytest.approx(1 - correct / total)


def test_eight_trials_two_at_a_time(tmp_path):
    """The printed loop, with `echo` for torchrun: each trial has a checkpoint of its own."""
    (loop,) = re.findall(r"^for half in .*?^wait\n", page("recipes/sweep"), re.M | re.S)
    said = 'torchrun() { echo "$CUDA_VISIBLE_DEVICES $*"; }\n'
    started = finished(["bash", "-c", said + loop], tmp_path).stdout.splitlines()
    gpus, paths = zip(*(line.split(" ")[:: len(line.split(" ")) - 1] for line in started))
    assert sorted(gpus) == ["0,1"] * 4 + ["2,3"] * 4
    assert len(set(paths)) == 8
