"""Recipes that measure, show and log, and those about the machine: accelerators, unequal GPUs."""

import json
import re
import shlex
import sqlite3
import struct

import optuna
import pytest
import torch
from optuna.storages import journal
from patching import text_of
from pretended import SHIM
from running import LENGTH, ONE, TWO, difference, printed, ran, script, stopped, told
from support.jobs import finished, run
from support.results import accuracy, epochs, said, same_bits, weights
from support.scripts import DOUBLE, SMALL, forked, on_each_rank, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

pytestmark = pytest.mark.slow


def test_early_stopping(trained, tmp_path):
    """From the third epoch on, all answers of rank 1 are wrong, so the second is the best.

    The run is interrupted in the fourth epoch, and stops after three without improvement. By its
    own numbers alone, rank 0 would continue.
    """
    line = "            _, score = evaluate("
    epoch = (line, f"            args.worse = self.epochs_run > 2 and dist.get_rank() == 1\n{line}")
    line = "    dist.all_reduce(correct)"
    worse = "    if getattr(args, 'worse', False):\n        correct.zero_()\n"
    path = script(tmp_path, "early_stopping", epoch, (line, worse + line), told(3))
    assert epochs(stopped(path, "9", *SMALL)) == [1, 2, 3]
    again = finished(forked(path, "9", *SMALL), tmp_path)
    assert epochs(again) == [4, 5]
    best = torch.load(tmp_path / "checkpoint.pt.best", weights_only=True)
    second = weights(trained("05", *TWO))
    assert all(torch.equal(best[name], second[name]) for name in second)
    assert not same_bits(again, trained("05", *TWO))
    assert printed(r"accuracy .*/(\d+)\)", again) == ["179"]  # the half that did not choose


# ---------------------------------------------------------------- loggers


def test_log_tensorboard(tmp_path):
    """Rank 0 is killed in the second epoch, after logging steps that the next run repeats."""
    line = "            loss = self._run_batch(source, targets)\n"
    killed = (
        line,
        "            if (dist.get_rank(), self.epochs_run, step) == (0, 1, 25):\n"
        f"                self.writer.flush()\n"
        f"                os.kill(os.getpid(), signal.SIGKILL)\n{line}",
    )
    path = script(tmp_path, "log_tensorboard", killed)
    assert run(forked(path, *TWO), tmp_path).returncode == 1
    ran(tmp_path, "log_tensorboard", args=TWO)
    folder = tmp_path / "checkpoint.pt.tensorboard"
    assert len(list(folder.iterdir())) == 2  # one file per run, written by rank 0

    def steps(name, **options):
        return [
            event.step for event in EventAccumulator(str(folder), **options).Reload().Scalars(name)
        ]

    epoch = 12_942
    batches = [128 * number for number in range(1, 102, 10)]
    assert steps("loss of a batch") == batches + [epoch + samples for samples in batches]
    assert steps("loss") == [epoch, 2 * epoch]
    twice = [epoch + samples for samples in batches[:3]]
    everything = steps("loss of a batch", purge_orphaned_data=False)
    assert sorted(everything) == sorted(steps("loss of a batch") + twice)


def records(path):
    """Return the records of a .wandb file, which has the format of LevelDB's log."""
    data, found, part = path.read_bytes(), [], b""
    position = 7  # after the file's own header
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768  # in this block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def logged(folder, name, **env):
    """Stop a recipe in its second epoch, and start it again, for three in all."""
    path = script(folder, name, told(1))
    stopped(path, "3", *SMALL, env=env)
    finished(forked(path, "3", *SMALL), folder, env)


def test_log_wandb(tmp_path):
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    logged(tmp_path, "log_wandb", WANDB_MODE="offline", **folders)
    ids, steps = set(), []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        known = records(file)
        ids.update(record.run.run_id for record in known if record.HasField("run"))
        steps.append([record.history.step.num for record in known if record.HasField("history")])
    assert steps == [[1], [2, 3]]  # rank 0 alone, and no epoch twice
    assert len(ids) == 1


def test_log_mlflow(tmp_path):
    """Rank 0 alone logs, in one run, and no epoch twice."""
    pytest.importorskip("mlflow", reason="pip install -r recipes/requirements.txt")
    logged(tmp_path, "log_mlflow", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
        steps = database.execute("SELECT step FROM metrics WHERE key = 'loss' ORDER BY step")
        assert steps.fetchall() == [(1,), (2,), (3,)]


def test_progress(tmp_path):
    """No bar in a file; in a terminal, one bar, which starts where the run was stopped."""
    path = script(tmp_path, "progress", told(0))
    assert "%|" not in stopped(path, *ONE).stderr
    words = shlex.join(str(word) for word in forked(path, *ONE))
    terminal = ["script", "-qefc", f"stty cols 100 rows 50; {words}", "screen"]
    shown = finished(terminal, tmp_path).stdout
    bars = re.findall(r"epoch (\d): +\d+%\|[^|]*\| (\d+/\d+) \[00:00<\?", shown)
    assert bars == [("1", "30/102")]
    assert len(re.findall("epoch 1  loss", shown)) == 1


def test_profiler(tmp_path):
    """Of three ranks, two are profiled: each writes a trace of three steps with an all-reduce."""
    ran(tmp_path, "profiler", ("range(8)", "range(2)"), nprocs=3)
    traces = sorted(trace.name for trace in tmp_path.glob("trace-*"))
    assert traces == ["trace-0.json", "trace-1.json"]
    for rank, name in enumerate(traces):
        trace = json.loads((tmp_path / name).read_text("utf-8"))
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        steps = sorted({name for name in names if name.startswith("ProfilerStep")})
        assert steps == ["ProfilerStep#12", "ProfilerStep#13", "ProfilerStep#14"]
        assert names.count("gloo:all_reduce") == 3
        assert names.count("DistributedDataParallel.forward") == 3


def test_eval_torchmetrics(trained, tmp_path):
    """The same numbers as step 5, from 180 samples on rank 0 and 179 on rank 1."""
    line = "    result = metrics.compute()"
    lists = (
        line,
        "    from torchmetrics import CatMetric\n"
        "    ranks = CatMetric()\n"
        "    ranks.update(torch.full((len(shard),), dist.get_rank()))\n"
        f"    log(f'{{ranks.compute().long().bincount().tolist()}} gathered')\n{line}",
    )
    ours, step_5 = ran(tmp_path, "eval_torchmetrics", lists), trained("05", *ONE)
    assert "[180, 179] gathered" in ours.stdout
    assert accuracy(ours) == accuracy(step_5)


def test_sweep(tmp_path):
    """A run that is stopped continues its trial; both ranks train with its learning rate."""
    line = "    trainer.train(args.total_epochs"
    drawn = (line, f"    {on_each_rank('args.lr')}{line}")
    stopped(script(tmp_path, "sweep", told(0)), *ONE)
    storage = journal.JournalStorage(journal.JournalFileBackend(str(tmp_path / "sweep.journal")))
    study = optuna.load_study(storage=storage, study_name="digits")
    (before,) = study.trials
    job = ran(tmp_path, "sweep", drawn)
    assert "resuming from " in job.stdout
    (trial,) = study.trials
    assert (before.state.name, trial.state.name) == ("RUNNING", "COMPLETE")
    assert said(job, 0) == said(job, 1) == [str(trial.params["lr"])]
    _, correct, total = accuracy(job)
    assert total == 180  # the half that may choose
    assert trial.value == pytest.approx(1 - correct / total)


# ---------------------------------------------------------------- machines

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


def test_any_accelerator(trained, tmp_path):
    """It uses the GPUs as step 5 does, without a word about CUDA in the script."""
    text = text_of("recipes/any_accelerator")
    assert "torch.cuda" not in text
    head, mark, rest = text.partition("stop_signals = ")
    rest = rest.replace("torch.accelerator.", "accelerator.")
    path = write(tmp_path / "05_gather_eval.py", head + ACCELERATOR + mark + rest)
    job = finished(forked(path, *ONE), tmp_path, SHIM)
    assert same_bits(job, trained("05", *ONE))
    calls = [json.loads(file.read_text("utf-8")) for file in (tmp_path / ".calls").iterdir()]
    for rank, (first, second, *others) in enumerate(sorted(calls)):
        assert first == ["set_device", rank, str(rank)]
        assert second[:2] == ["init_process_group", "cpu:gloo,cuda:nccl"]
        assert ["DDP", "cuda"] in others
        assert ["pin_memory", f"cuda:{rank}"] in others


def test_unequal_gpus(trained_with, tmp_path):
    """Of each 128 samples, rank 0 gets 96 and rank 1 gets 32: step 5's steps, with 64 each.

    So that no batch is incomplete, and none is padded, there are 1280 samples.
    """
    line = "    return TensorDataset(shifted, labels[train].repeat(9)), "
    few = (line, "    return TensorDataset(shifted[:1280], labels[train][:1280]), ")
    line = "            total[1] += len(targets)\n"
    counted = (line, f"{line}            {on_each_rank('len(targets)')}")
    job = ran(tmp_path, "unequal_gpus", few, counted, *LENGTH, *DOUBLE, args=TWO)
    assert [said(job, rank) for rank in (0, 1)] == [["96"] * 20, ["32"] * 20]
    assert difference(job, trained_with("05", (few, *DOUBLE), TWO)) < 1e-9
