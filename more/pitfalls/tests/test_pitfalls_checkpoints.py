"""Pitfalls in saving and resuming: only the broken script shows the symptom."""

import re
import shutil

import pytest
import torch
from changes import IMPATIENT
from running import ONE, TWO
from support.jobs import run
from support.positions import BATCH, RANK_1_LOOKS_ELSEWHERE, TOLD
from support.results import error_lines, losses, same_bits, weights
from support.scripts import edited, forked

pytestmark = pytest.mark.slow
REPLACE = '        os.replace(f"{self.path}.new", self.path)\n'


def alone(script, *args, nprocs=1):
    """Run a script, on one rank unless more are wanted; return the Job."""
    return run(forked(script, *args, nprocs=nprocs), script.parent)


@pytest.fixture
def saved(trained):
    """The checkpoint of one rank after the first epoch."""
    return trained("05", *ONE, nprocs=1).cwd / "checkpoint.pt"


@pytest.fixture
def undisturbed(trained):
    """An uninterrupted run of both epochs."""
    return trained("05", *TWO, nprocs=1)


@pytest.fixture
def resumed(pitfall):
    """Return a function that resumes a checkpoint with a pitfall's script and with step 5."""

    def resume(checkpoint, *changes, args=TWO, nprocs=1):
        step = edited(pitfall.at("step").folder, "05", *changes)
        scripts = pitfall.at("broken").script(*changes), step
        for script in scripts:
            shutil.copy(checkpoint, script.with_name("checkpoint.pt"))
        return [alone(script, *args, nprocs=nprocs) for script in scripts]

    return resume


def refused(job):
    """Return the message with which a script refuses a checkpoint."""
    assert job.returncode == 1, job
    (line,) = [line for line in error_lines(job) if "cannot load checkpoint.pt" in line]
    return line


def test_every_rank_saves(pitfall):
    """Both ranks write the file; rank 1 renames it after rank 0 has."""
    turns = f"""\
        dist.barrier()
        if dist.get_rank() == 1:
            dist.barrier()
{REPLACE}        if dist.get_rank() == 0:
            dist.barrier()
"""
    pitfall.refused((REPLACE, turns), IMPATIENT)


def test_module_prefix_saved(pitfall, saved):
    job = pitfall.ran(nprocs=1)
    assert set(weights(job)) == {f"module.{key}" for key in weights(saved)}
    pitfall.refused(nprocs=1)


def test_module_prefix_saved_is_removed_by_the_function_of_the_remedy_alone():
    keys = "module.attention_module.weight", "module.0.weight"
    state, by_hand = dict.fromkeys(keys), [key.replace("module.", "") for key in keys]
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    assert list(state) == ["attention_module.weight", "0.weight"]
    assert by_hand == ["attention_weight", "0.weight"]


def test_resume_without_optimizer(saved, undisturbed, resumed):
    broken, step = resumed(saved)
    assert (broken.returncode, step.returncode) == (0, 0), (broken, step)
    assert not same_bits(broken, undisturbed)
    assert same_bits(step, undisturbed)


def test_lr_overruled(saved, undisturbed, resumed):
    """The broken script ends like a run that was not given another learning rate."""
    broken, step = resumed(saved, args=(*TWO, "--lr=1e-5"))
    assert broken.returncode == 0, broken
    assert same_bits(broken, undisturbed)
    assert "it was saved with {'width': 4, 'lr': 0.004, 'seed': 0}" in refused(step)


def test_epoch_starts_again(pitfall, saved, resumed):
    """Interrupted after 640 samples of 12,942."""
    told = (BATCH, f"            {TOLD}\n{BATCH}")
    first = alone(edited(pitfall.folder, "05", told), *ONE)
    assert "interrupted after 640 samples of the epoch" in first.stdout
    line = "            self.epochs_run += 1\n"
    count = (line, f'            log(f"{{self.samples_run}} samples of 12942")\n{line}')
    jobs = resumed(pitfall.folder / "checkpoint.pt", count, args=ONE)
    counts = [re.findall(r"^(\d+) samples of 12942$", job.stdout, re.MULTILINE) for job in jobs]
    assert counts == [["13582"], ["12942"]]
    assert [same_bits(job, saved) for job in jobs] == [False, True]


def test_unseen_checkpoint(trained, resumed):
    """Rank 1 does not see the checkpoint: the broken script trains with other losses, and hangs."""
    path = trained("03", *ONE).cwd / "checkpoint.pt"
    jobs = resumed(path, RANK_1_LOOKS_ELSEWHERE, IMPATIENT, nprocs=2)
    right = losses(trained("05", *TWO))[1:]
    assert losses(jobs[0]) not in ([], right)
    assert "Timed out waiting" in jobs[0].stderr, jobs[0]
    assert all("all must see the same" in line for line in error_lines(jobs[1])), jobs[1]
    assert losses(jobs[1]) == []


LOAD = "def load_datasets():\n"
CUT = f"""\
def cut(checkpoint, file):
    save(checkpoint, file)
    os.truncate(getattr(file, "name", file), 1000)
    os.kill(os.getpid(), 9)


save, torch.save = torch.save, cut


{LOAD}"""


def test_written_in_place(pitfall, saved, resumed):
    """The rank is killed during the save after the second epoch, after 1000 bytes."""
    broken, step = resumed(saved, (LOAD, CUT))
    assert all("exit codes of the ranks: [-9]" in job.stderr for job in (broken, step))
    assert same_bits(step, saved)
    assert (broken.cwd / "checkpoint.pt").stat().st_size == 1000
    again = alone(broken.cwd / "05_gather_eval.py", *TWO)
    assert pitfall.on_screen()[0] in refused(again)
