"""Pitfalls in saving and resuming: only the broken script shows the symptom."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from patching import on_screen, patched
from running import IMPATIENT, ONE, TWO
from support.jobs import run
from support.positions import BATCH, TOLD
from support.results import error_lines, same_bits, weights
from support.scripts import edited, forked

pytestmark = pytest.mark.slow
LOAD = "def load_datasets():\n"
REPLACE = '        os.replace(f"{self.path}.new", self.path)\n'


def alone(script, *args):
    """Run a script on one rank; return the Result."""
    return run(forked(script, *args, nprocs=1), script.parent)


@pytest.fixture
def saved(trained):
    """The checkpoint of one rank after the first epoch."""
    return trained("05", *ONE, nprocs=1).cwd / "checkpoint.pt"


@pytest.fixture
def undisturbed(trained):
    """An uninterrupted run of both epochs."""
    return trained("05", *TWO, nprocs=1)


@pytest.fixture
def resumed(tmp_path):
    """Return a function that resumes a checkpoint with a pitfall's script and with step 5."""

    def resume(name, checkpoint, *changes, args=TWO):
        jobs = []
        for make, what in (patched, f"pitfalls/{name}"), (edited, "05"):
            folder = tmp_path / make.__name__
            folder.mkdir()
            script = make(folder, what, *changes)
            shutil.copy(checkpoint, folder / "checkpoint.pt")
            jobs.append(alone(script, *args))
        return jobs

    return resume


def refused(job):
    """Return the message with which a script refuses a checkpoint."""
    assert job.returncode == 1, job
    (line,) = [line for line in error_lines(job) if "cannot load checkpoint.pt" in line]
    return line


def test_every_rank_saves(tmp_path):
    """Both ranks write the file; rank 1 renames it after rank 0 has."""
    turns = f"""\
        dist.barrier()
        if dist.get_rank() == 1:
            dist.barrier()
{REPLACE}        if dist.get_rank() == 0:
            dist.barrier()
"""
    script = patched(tmp_path, "pitfalls/every_rank_saves", (REPLACE, turns), IMPATIENT)
    job = run(forked(script, *ONE), tmp_path)
    assert job.returncode == 1
    (error,) = on_screen("pitfalls/every_rank_saves")
    assert error in error_lines(job)


def test_module_prefix_saved(saved, tmp_path):
    script = patched(tmp_path, "pitfalls/module_prefix_saved")
    assert alone(script, *ONE).returncode == 0
    assert set(weights(tmp_path / "checkpoint.pt")) == {f"module.{key}" for key in weights(saved)}
    error = refused(alone(script, *ONE))
    assert all(text in error for text in on_screen("pitfalls/module_prefix_saved"))


NAMED = (
    "    return nn.Sequential(*first, *second, *third, nn.Linear(4 * width * 4 * 4, 10))\n",
    """\
    model = nn.Sequential(*first, *second, *third)
    model.attention_module = nn.Linear(4 * width * 4 * 4, 10)  # Sequential calls it last
    return model
""",
)


def test_module_regex(resumed, tmp_path):
    assert alone(edited(tmp_path, "05", NAMED), *ONE).returncode == 0
    checkpoint = tmp_path / "checkpoint.pt"
    broken, step = resumed("module_regex", checkpoint, NAMED, args=ONE)
    error = refused(broken)
    assert all(text in error for text in on_screen("pitfalls/module_regex"))
    assert step.returncode == 0, step


def test_resume_without_optimizer(saved, undisturbed, resumed):
    broken, step = resumed("resume_without_optimizer", saved)
    assert (broken.returncode, step.returncode) == (0, 0), (broken, step)
    assert not same_bits(broken, undisturbed)
    assert same_bits(step, undisturbed)


def test_lr_overruled(saved, undisturbed, resumed):
    """The broken script ends like a run that was not given another learning rate."""
    broken, step = resumed("lr_overruled", saved, args=(*TWO, "--lr=1e-5"))
    assert broken.returncode == 0, broken
    assert same_bits(broken, undisturbed)
    assert "it was saved with {'width': 4, 'lr': 0.004, 'seed': 0}" in refused(step)


def test_epoch_starts_again(saved, resumed, tmp_path):
    """Interrupted after 640 samples of 12,942."""
    told = f"            {TOLD}\n{BATCH}"
    first = alone(edited(tmp_path, "05", (BATCH, told)), *ONE)
    assert "interrupted after 640 samples of the epoch" in first.stdout
    line = "            self.epochs_run += 1\n"
    count = f'            log(f"{{self.samples_run}} samples of "\n{" " * 16}f"{{self.train_loader'
    count += f'.sampler.total_size}}")\n{line}'
    checkpoint = tmp_path / "checkpoint.pt"
    jobs = resumed("epoch_starts_again", checkpoint, (line, count), args=ONE)
    counts = [re.findall(r"^(\d+) samples of (\d+)$", job.stdout, re.MULTILINE) for job in jobs]
    assert counts == [[("13582", "12942")], [("12942", "12942")]]
    assert [same_bits(job, saved) for job in jobs] == [False, True]


class Program:
    """Creates a folder when pickle loads it."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_weights_only_false(saved, resumed, tmp_path):
    checkpoint = {**torch.load(saved, weights_only=True), "COMMENT": Program()}
    torch.save(checkpoint, tmp_path / "elsewhere.pt")
    jobs = resumed("weights_only_false", tmp_path / "elsewhere.pt", args=ONE)
    assert [(job.cwd / "executed").is_dir() for job in jobs] == [True, False]
    broken, step = jobs
    assert broken.returncode == 0, broken
    assert "resuming from checkpoint.pt after epoch 1" in broken.stdout
    assert "Weights only load failed" in refused(step)


KILLED = (
    LOAD,
    f"""\
def cut(checkpoint, file):
    save(checkpoint, file)
    os.truncate(getattr(file, "name", file), 1000)
    os.kill(os.getpid(), 9)


save, torch.save = torch.save, cut


{LOAD}""",
)


def test_written_in_place(saved, resumed):
    """The rank is killed during the save after the second epoch, after 1000 bytes."""
    broken, step = resumed("written_in_place", saved, KILLED)
    assert all("exit codes of the ranks: [-9]" in job.stderr for job in (broken, step))
    assert same_bits(step, saved)
    assert Path(broken.cwd / "checkpoint.pt").stat().st_size == 1000
    (text,) = on_screen("pitfalls/written_in_place")
    assert text in refused(alone(broken.cwd / "05_gather_eval.py", *TWO))
