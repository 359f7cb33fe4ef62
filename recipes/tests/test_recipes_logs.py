"""Recipes that change what is measured, shown and logged."""

import re
import shlex
import struct

import pytest
import torch
from support.jobs import finished, run
from support.positions import stopped, told
from support.results import epochs, same_bits, weights
from support.scripts import SMALL, forked, patched
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

SLOW = pytest.mark.slow
START = "(source, targets) in enumerate(self.train_loader):\n"


# ---------------------------------------------------------------- early stopping


@SLOW
def test_early_stopping(trained, tmp_path):
    """From the third epoch on, all answers of rank 1 are wrong, so the second is the best.

    The run is interrupted in the fourth epoch, and stops after three without improvement. By its
    own numbers alone, rank 0 would continue.
    """
    line = "            _, score = evaluate("
    epoch = (line, f"            args.worse = self.epochs_run > 2 and dist.get_rank() == 1\n{line}")
    line = "    dist.all_reduce(correct)"
    worse = "    if getattr(args, 'worse', False):\n        correct.zero_()\n"
    path = patched(tmp_path, "recipes/early_stopping", epoch, (line, worse + line), told(3))
    job = stopped(path, "9", *SMALL)
    assert epochs(job) == [1, 2, 3]
    again = finished(forked(path, "9", *SMALL), tmp_path)
    assert epochs(again) == [4, 5]
    best = torch.load(tmp_path / "checkpoint.pt.best", weights_only=True)
    second = weights(trained("05", "2", *SMALL))
    assert all(torch.equal(best[name], second[name]) for name in second)
    assert not same_bits(again, trained("05", "2", *SMALL))
    total = int(re.search(r"^accuracy .*/(\d+)\)$", again.stdout, re.MULTILINE)[1])
    assert total == 179  # the half that did not choose the model


# ---------------------------------------------------------------- loggers


@SLOW
def test_log_tensorboard(tmp_path):
    """Rank 0 is killed in the second epoch, after logging steps that the next run repeats."""
    line = "            loss = self._run_batch(source, targets)\n"
    killed = (
        line,
        "            if (dist.get_rank(), self.epochs_run, step) == (0, 1, 25):\n"
        f"                self.writer.flush()\n"
        f"                os.kill(os.getpid(), signal.SIGKILL)\n{line}",
    )
    path = patched(tmp_path, "recipes/log_tensorboard", killed)
    assert run(forked(path, "2", *SMALL), tmp_path).returncode == 1
    finished(forked(patched(tmp_path, "recipes/log_tensorboard"), "2", *SMALL), tmp_path)
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


@SLOW
def test_log_wandb(tmp_path):
    path = patched(tmp_path, "recipes/log_wandb", told(1))
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    env = {"WANDB_MODE": "offline", **folders}
    stopped(path, "3", *SMALL, env=env)
    finished(forked(path, "3", *SMALL), tmp_path, env)
    ids, logged = set(), []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        known = records(file)
        ids.update(record.run.run_id for record in known if record.HasField("run"))
        logged.append([record.history.step.num for record in known if record.HasField("history")])
    assert logged == [[1], [2, 3]]  # rank 0 alone, and no epoch twice
    assert len(ids) == 1


@SLOW
def test_progress(tmp_path):
    """No bar in a file; in a terminal, one bar, which starts where the run was stopped."""
    path = patched(tmp_path, "recipes/progress", told(1))
    assert "%|" not in stopped(path, "2", *SMALL).stderr
    words = shlex.join(str(word) for word in forked(path, "2", *SMALL))
    terminal = ["script", "-qefc", f"stty cols 100 rows 50; {words}", "screen"]
    shown = finished(terminal, tmp_path).stdout
    bars = re.findall(r"epoch (\d): +\d+%\|[^|]*\| (\d+/\d+) \[00:00<\?", shown)
    assert bars == [("2", "30/102")]
    assert len(re.findall("epoch 2  loss", shown)) == 1


# ---------------------------------------------------------------- metrics


@SLOW
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
    path = patched(tmp_path, "recipes/eval_torchmetrics", lists)
    ours, step_5 = finished(forked(path, "1", *SMALL), tmp_path), trained("05", "1", *SMALL)
    assert "[180, 179] gathered" in ours.stdout
    tail = step_5.stdout.splitlines()[-11:]  # the confusion matrix, and the accuracy
    assert ours.stdout.splitlines()[-11:] == tail
    assert tail[-1].startswith("accuracy ")
