"""Step 3: torchrun restarts a killed run, which ends with the bits of an undisturbed one."""

import random
import sys
import time

import pytest
import torch
from support.jobs import RESTARTS, Job, finished, kill, run
from support.results import accuracy, epochs, error_lines, resumed, same_bits
from support.scripts import LONG, SCRIPT, SMALL, command, forked, load


def test_a_finished_job_only_evaluates(trained, tmp_path):
    undisturbed = trained("03", *LONG)
    saved = (undisturbed.cwd / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(saved)
    job = finished(forked("03", *LONG, nprocs=1), tmp_path)
    assert resumed(job) == [4]
    assert epochs(job) == []
    assert accuracy(job) == accuracy(undisturbed)
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved


def kill_one(tmp_path, nprocs, rank, moment, args=LONG):
    """Kill a worker when a line of output matches `moment`; return the job when it has ended."""
    start = command("03", *args, nprocs=nprocs, torchrun=("--max-restarts=1",))
    with Job(start, tmp_path, RESTARTS) as job:
        job.wait_for(lambda: len(job.workers()) == nprocs)
        worker = job.workers()[rank]
        job.wait_for(moment)
        worker.kill()  # raises if the worker has already ended
        job.wait(180).wait_until_gone()
    assert job.returncode == 0, job
    assert len(resumed(job)) == 1, job
    return job


def test_kill_9_with_4_processes(trained, tmp_path):
    job = kill_one(tmp_path, 4, 3, "^epoch 1 ")
    assert resumed(job)[0] < 4
    assert sorted(set(epochs(job))) == [1, 2, 3, 4]
    assert same_bits(job, trained("03", *LONG, nprocs=4))
    assert accuracy(job) == accuracy(trained("03", *LONG, nprocs=4))


@pytest.mark.everything
def test_kill_9_repeats_what_was_not_saved(trained, tmp_path):
    job = kill_one(tmp_path, 2, 0, "^epoch 6 ", ("8", "5", *SMALL))
    assert resumed(job) == [5]
    assert epochs(job)[:6] == [1, 2, 3, 4, 5, 6]
    assert epochs(job)[-3:] == [6, 7, 8]
    assert same_bits(job, trained("03", "8", *SMALL))


@pytest.mark.everything
def test_kill_9_at_any_moment(trained, tmp_path, repetitions):
    """Restarts succeed after all kills, at any time between the first import and the end."""
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
                    if len(pids) == 2 and not pids & old:  # all of them are of this restart
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
    job = run([sys.executable, SCRIPT["03"]], tmp_path)
    assert job.returncode == 1
    assert "environment variable RANK expected" in job.stderr.splitlines()[-1]


def test_restarts_need_a_store_of_their_own(tmp_path):
    start = command("03", "1", *SMALL, nprocs=1, torchrun=("--max-restarts=1",))
    job = run(start, tmp_path)
    assert job.returncode == 1
    (line,) = error_lines(job)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    assert not (tmp_path / "checkpoint.pt").exists()


def test_torchrun_reports_the_exception(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    job = run(command("03", "1", *SMALL), tmp_path)
    assert job.returncode == 1
    report = job.stderr.split("Root Cause (first observed failure):")[1]
    assert "RuntimeError: cannot load checkpoint.pt, move it away: " in report
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"not a checkpoint"
