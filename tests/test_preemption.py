"""Steps 4 and 5 are told to stop: they save in mid-epoch, leave, and go on as if nothing was."""

import signal

import pytest
import torch
from conftest import (
    SMALL,
    Job,
    command,
    edited,
    epochs,
    finished,
    kill,
    load,
    same_bits,
)

EPOCHS = ("8", *SMALL)  # of some tenths of a second each
TERM = {
    "the agent": lambda job: job.process.send_signal(signal.SIGTERM),
    "the first worker": lambda job: kill(job.workers()[0], signal.SIGTERM),
    "the last worker": lambda job: kill(job.workers()[max(job.workers())], signal.SIGTERM),
    "all": lambda job: [kill(process, signal.SIGTERM) for process in job.processes()],
}
EVERYTHING = pytest.mark.everything


def interrupt(tmp_path, start, after, hurt):
    """Start a job, hurt it after a line of its output, and see it leave in mid-epoch."""
    with Job(start, tmp_path) as job:
        job.wait_for(after)
        hurt(job)
        job.wait(60).wait_until_gone()
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert 0 < checkpoint["SAMPLES_RUN"] < 12_942, job
    assert checkpoint["EPOCHS_RUN"] < 8, job
    assert f"interrupted after {checkpoint['SAMPLES_RUN']:,} samples" in job.stdout
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    assert job.returncode != 0
    assert "accuracy" not in job.stdout
    return job


def resume(tmp_path, start, *earlier):
    """Start the job again; each epoch is to be printed once in all of its lives."""
    job = finished(start, tmp_path)
    assert "epochs run" in job.stdout
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert [number for life in (*earlier, job) for number in epochs(life)] == list(range(1, 9))
    return job


@pytest.mark.parametrize(
    ("step", "nprocs", "whom"),
    [
        ("04", 2, "the last worker"),
        *(pytest.param("04", 2, whom, marks=EVERYTHING) for whom in TERM if "last" not in whom),
        *(pytest.param("04", 4, whom, marks=EVERYTHING) for whom in TERM),
        pytest.param("05", 2, "the agent", marks=EVERYTHING),
    ],
)
def test_told_to_stop_and_started_again(trained, tmp_path, step, nprocs, whom):
    start = command(step, *EPOCHS, nprocs=nprocs)
    job = interrupt(tmp_path, start, "^epoch 1 ", TERM[whom])
    job = resume(tmp_path, start, job)
    assert same_bits(job, trained("02", *EPOCHS, nprocs=nprocs))


def test_told_twice_with_4_processes(trained, tmp_path):
    start = command("04", *EPOCHS, nprocs=4)
    first = interrupt(tmp_path, start, "^epoch 1 ", TERM["the agent"])
    second = interrupt(tmp_path, start, f"^epoch {max(epochs(first)) + 1} ", TERM["the agent"])
    job = resume(tmp_path, start, first, second)
    assert same_bits(job, trained("02", *EPOCHS, nprocs=4))


@EVERYTHING
def test_restarted_in_place(trained, tmp_path):
    """With restarts left, torchrun itself starts again what left with exit code 75."""
    start = command("04", *EPOCHS, torchrun=("--max-restarts=1",))
    with Job(start, tmp_path) as job:
        job.wait_for("^epoch 1 ")
        TERM["the first worker"](job)
        assert job.wait().returncode == 0, job
        job.wait_until_gone()
    assert "interrupted after" in job.stdout
    assert epochs(job) == list(range(1, 9))
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert same_bits(job, trained("02", *EPOCHS))


def test_workers_of_a_dead_agent_save_and_leave(trained, tmp_path):
    start = command("04", *EPOCHS)
    job = interrupt(tmp_path, start, "^epoch 1 ", lambda job: kill(job.process))
    assert same_bits(resume(tmp_path, start, job), trained("02", *EPOCHS))


@EVERYTHING
def test_workers_of_a_dead_agent_leave_step_3_too(tmp_path):
    with Job(command("03", "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        kill(job.process)
        job.wait_until_gone()
    assert "torchrun is gone" in job.stderr


def test_told_on_the_last_step_of_an_epoch(tmp_path):
    """There is nothing left of this epoch to go on with, so it leaves in the next one."""
    told = "if self.samples_run >= 12_942: self.told_to_stop.fill_(1)"
    line = "            self.samples_run += len(targets) * dist.get_world_size()\n"
    changes = (line, f"{line}            {told}\n"), ("step % 10 == 0 and self._stop", "self._stop")
    start = command(edited(tmp_path, "04", *changes), "6", "--batch-size=4096", nprocs=1)
    with Job(start, tmp_path) as job:
        assert job.wait().returncode == 1
    assert epochs(job) == [1]
    assert "interrupted after 4,096 samples" in job.stdout


def deal(world_size, samples_run, samples=1000):
    """Return what is left of an epoch, for each rank."""
    module = load("04")
    shards = []
    for rank in range(world_size):
        sampler = module.ResumableSampler(range(samples), world_size, rank, seed=5)
        sampler.set_epoch(3)
        sampler.samples_run = samples_run
        shards.append(list(sampler))
        assert len(shards[-1]) == len(sampler)
    assert len({len(shard) for shard in shards}) == 1
    return shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_the_sampler_goes_on_where_it_was(world_size):
    distributed = load("04").DistributedSampler
    for rank, shard in enumerate(deal(world_size, 0)):
        whole = distributed(range(1000), world_size, rank, seed=5)
        whole.set_epoch(3)
        assert shard == list(whole)
        for steps in (1, 10, len(shard) - 1):
            assert deal(world_size, steps * world_size)[rank] == shard[steps:]


@EVERYTHING
def test_the_sampler_of_4096_ranks():
    """Nobody needs to start them to see what each would draw."""
    whole = deal(4096, 0, 12_942)
    assert {len(shard) for shard in whole} == {4}
    assert {index for shard in whole for index in shard} == set(range(12_942))
    assert deal(4096, 2 * 4096, 12_942) == [shard[2:] for shard in whole]


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1), (1, 16), (16, 7)])
def test_the_sampler_in_another_world(before, after):
    """No sample is run twice or missed, the padding apart."""
    steps = 20
    run = [index for shard in deal(before, 0) for index in shard[:steps]]
    left = [index for shard in deal(after, len(run)) for index in shard]
    assert len(run) == len(set(run)) == steps * before
    padding = -(1000 - len(run)) % after
    assert sorted(run + left)[0] == 0
    assert set(run + left) == set(range(1000))
    assert len(run + left) == 1000 + padding
