"""Step 3: torchrun restarts a killed run; its final weights are those of an undisturbed run."""

import random
import time

import pytest
import torch
from support.jobs import RESTARTS, Job, finished, kill, run
from support.positions import KILLED, at
from support.results import accuracy, epochs, error_lines, resumed, same_bits
from support.scripts import LONG, SMALL, command, edited, exact, forked, load


def test_a_finished_job_only_evaluates(trained, tmp_path):
    undisturbed = trained("03", *LONG)
    saved = (undisturbed.cwd / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(saved)
    job = finished(forked("03", *LONG, nprocs=1), tmp_path)
    assert resumed(job) == [4]
    assert epochs(job) == []
    assert accuracy(job) == accuracy(undisturbed)
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved


def test_kill_9_with_4_processes(trained_with, tmp_path):
    undisturbed = trained_with("03", exact(4), LONG, nprocs=4)
    killed = at(1, 20, KILLED, when="dist.get_rank() == 3")
    start = forked(edited(tmp_path, "03", killed, *exact(4)), *LONG, nprocs=4, restarts=1)
    job = finished(start, tmp_path)
    assert resumed(job) == [1]
    assert epochs(job) == [1, 2, 3, 4]
    assert same_bits(job, undisturbed)
    assert accuracy(job) == accuracy(undisturbed)


@pytest.mark.slow
def test_kill_9_repeats_what_was_not_saved(trained, tmp_path):
    """The kill comes after the third epoch, which was not saved."""
    killed = edited(tmp_path, "03", at(3, 20, KILLED, when="dist.get_rank() == 0"))
    start = command(killed, "4", "2", *SMALL, torchrun=("--max-restarts=1",))
    job = finished(start, tmp_path, RESTARTS)
    assert resumed(job) == [2]
    assert epochs(job) == [1, 2, 3, 3, 4]
    assert same_bits(job, trained("03", *LONG))


@pytest.mark.slow
def test_kill_9_at_any_moment(trained, tmp_path, repetitions):
    """Every restart succeeds, whenever a rank is killed between the first import and the end."""
    moments, kills, life, wanted = random.Random(), 0, 8, repetitions(20)
    for attempt in range(wanted):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        start = command("03", *LONG, torchrun=("--max-restarts=4",))
        with Job(start, folder, RESTARTS) as job:
            old = set()
            for _ in range(min(4, wanted - kills)):
                time.sleep(moments.uniform(0, life))
                while job.process.poll() is None:
                    workers = job.workers()
                    pids = {worker.pid for worker in workers.values()}
                    if len(pids) == 2 and not pids & old:  # both belong to this restart
                        kill(workers[kills % 2])
                        kills += 1
                        old = pids
                        break
                    time.sleep(0.05)
            job.wait(180).wait_until_gone()
        assert job.returncode == 0, (attempt, job)
        assert same_bits(job, trained("03", *LONG)), (attempt, job)
        assert sorted(set(epochs(job))) == [1, 2, 3, 4], (attempt, job)
        if kills == wanted:
            break
    assert kills == wanted


def test_the_checkpoint_holds_what_a_resume_needs(trained):
    path = trained("03", *LONG).cwd / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["EPOCHS_RUN"] == 4
    assert checkpoint["CONFIG"] == {"width": 4, "lr": 4e-3, "seed": 0}
    assert checkpoint["MODEL_STATE"].keys() == load("03").build_model(4).state_dict().keys()
    steps = {int(state["step"]) for state in checkpoint["OPTIMIZER_STATE"]["state"].values()}
    assert steps == {4 * 102}  # 12 942 samples, 2 processes, batches of 64


def test_without_torchrun(tmp_path):
    job = run(forked("03", nprocs=0), tmp_path)
    assert job.returncode == 1
    assert "environment variable RANK expected" in job.stderr.splitlines()[-1]


@pytest.mark.slow
def test_restarts_need_a_store_of_their_own(tmp_path):
    start = command("03", "1", *SMALL, nprocs=1, torchrun=("--max-restarts=1",))
    job = run(start, tmp_path)
    assert job.returncode == 1
    (line,) = error_lines(job)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    assert not (tmp_path / "checkpoint.pt").exists()


def test_torchrun_reports_the_exception(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    job = run(command("03", "1", *SMALL, nprocs=1), tmp_path)
    assert job.returncode == 1
    report = job.stderr.split("Root Cause (first observed failure):")[1]
    assert "RuntimeError: cannot load checkpoint.pt, move it away: " in report
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"not a checkpoint"
