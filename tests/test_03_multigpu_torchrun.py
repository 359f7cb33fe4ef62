"""Step 3: a run that is killed goes on, and ends with the weights of an undisturbed one."""

import random
import sys
import time

import pytest
import torch
from conftest import (
    LONG,
    SCRIPT,
    SMALL,
    Job,
    accuracy,
    command,
    epochs,
    error_lines,
    finished,
    kill,
    load,
    run,
    same_bits,
)

RESTARTS = ("--max-restarts=3",)


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.everything)])
def test_a_job_started_again_goes_on(trained, tmp_path, nprocs):
    first = finished(command("03", "2", *SMALL, nprocs=nprocs), tmp_path)
    assert epochs(first) == [1, 2]
    again = finished(command("03", *LONG, nprocs=nprocs), tmp_path)
    assert again.stdout.startswith("checkpoint.pt: 2 of 4 epochs run\n")
    assert epochs(again) == [3, 4]
    assert same_bits(again, trained("03", *LONG, nprocs=nprocs))


def test_a_finished_job_says_so(trained, tmp_path):
    undisturbed = trained("03", *LONG)
    saved = (undisturbed.cwd / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(saved)
    job = finished(command("03", *LONG, nprocs=1), tmp_path)
    assert job.stdout.startswith("checkpoint.pt: 4 of 4 epochs run\n")
    assert epochs(job) == []
    assert accuracy(job) == accuracy(undisturbed)
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved


def kill_one(tmp_path, nprocs, rank, moment, args=LONG):
    """Kill a worker as soon as a line of output begins so; return the job at its end."""
    start = command("03", *args, nprocs=nprocs, torchrun=RESTARTS)
    with Job(start, tmp_path) as job:
        job.wait_for(lambda: len(job.workers()) == nprocs)
        worker = job.workers()[rank]
        job.wait_for(moment)
        worker.kill()  # which fails if it is no longer there
        job.wait(180).wait_until_gone()
    assert job.returncode == 0, job
    assert "epochs run" in job.stdout, job
    return job


def test_kill_9_with_4_processes(trained, tmp_path):
    job = kill_one(tmp_path, 4, 3, "^epoch 1 ")
    before, after = job.stdout.split(" epochs run\n")
    assert "epoch 4 " not in before
    assert "epoch 4 " in after
    assert sorted(set(epochs(job))) == [1, 2, 3, 4]
    assert same_bits(job, trained("02", *LONG, nprocs=4))
    assert accuracy(job) == accuracy(trained("02", *LONG, nprocs=4))


def test_kill_9_and_what_was_not_saved_is_run_again(trained, tmp_path):
    job = kill_one(tmp_path, 2, 0, "^epoch 6 ", ("8", "5", *SMALL))
    assert "checkpoint.pt: 5 of 8 epochs run" in job.stdout
    assert epochs(job)[:6] == [1, 2, 3, 4, 5, 6]
    assert epochs(job)[-3:] == [6, 7, 8]
    assert same_bits(job, trained("02", "8", *SMALL))


@pytest.mark.everything
def test_kill_9_at_any_moment(trained, tmp_path):
    """Twenty of twenty, from the first import to the last line, each rank in turn."""
    undisturbed = trained("02", *LONG)
    nprocs, moments, kills, seconds = 2, random.Random(2), 0, 10
    for attempt in range(40):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        start = command("03", *LONG, nprocs=nprocs, torchrun=RESTARTS)
        begin = time.monotonic()
        end = begin + moments.uniform(0, seconds)
        with Job(start, folder) as job:
            while job.process.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
            worker = job.workers().get(attempt % nprocs)
            if worker and job.process.poll() is None:
                kill(worker)
                kills += 1
            else:  # before the workers were started, or after they had ended
                seconds = time.monotonic() - begin if job.process.poll() == 0 else seconds
            job.wait(180).wait_until_gone()
        assert job.returncode == 0, (attempt, job)
        assert same_bits(job, undisturbed), (attempt, job)
        assert sorted(set(epochs(job))) == [1, 2, 3, 4], (attempt, job)
        if kills == 20:
            break
    assert kills == 20


def test_the_checkpoint_holds_what_a_resume_needs(trained):
    path = trained("03", *LONG).cwd / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["EPOCHS_RUN"] == 4
    assert checkpoint["CONFIG"] == {"format": 1, "width": 4, "lr": 1e-3, "seed": 0}
    assert checkpoint["MODEL_STATE"].keys() == load("03").DigitReader(4).state_dict().keys()
    steps = {int(state["step"]) for state in checkpoint["OPTIMIZER_STATE"]["state"].values()}
    assert steps == {4 * 102}  # 12 942 samples, 2 processes, 64 in a batch


def test_without_torchrun(tmp_path):
    job = run([sys.executable, SCRIPT["03"]], tmp_path)
    assert job.returncode == 2
    assert job.stderr.splitlines() == [
        "03_multigpu_torchrun.py: error: start it with: "
        "torchrun --standalone --nproc-per-node=2 03_multigpu_torchrun.py"
    ]


def test_torchrun_alone_says_how_many(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("sys.argv", ["03_multigpu_torchrun.py", "--nprocs=2"])
    with pytest.raises(SystemExit):
        load("03").parse_args()
    assert "unrecognized arguments: --nprocs=2" in capsys.readouterr().err


def test_restarts_want_a_store_of_their_own(tmp_path):
    start = command("03", "1", *SMALL, nprocs=1, torchrun=("--max-restarts=1",))
    job = run(start, tmp_path, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": None})
    assert job.returncode != 0
    lines = set(error_lines(job))
    assert len(lines) == 1
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in lines.pop()


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = load("03")
    monkeypatch.setattr("sys.argv", ["03_multigpu_torchrun.py"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    module.parse_args()
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit) as stop:
        module.parse_args()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--nproc-per-node must be at most 2" in line


def test_a_bad_checkpoint_under_torchrun(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    job = run(command("03", "1", *SMALL, nprocs=1), tmp_path)
    assert job.returncode == 1
    lines = set(error_lines(job))
    assert len(lines) == 1
    assert "cannot resume from checkpoint.pt" in lines.pop()
    assert "exitcode  : 2" in job.stderr
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"not a checkpoint"
