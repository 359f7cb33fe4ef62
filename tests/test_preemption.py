"""Told to stop, steps 4 and 5 save mid-epoch and exit; a resume is bit-for-bit identical."""

import signal
import time

import pytest
import torch
from support.jobs import RESTARTS, Job, finished, kill, run
from support.positions import GATE, ON_RANK_1, TOLD, at, wait_at_the_gate
from support.results import accuracy, epochs, same_bits
from support.scripts import LONG, command, edited, exact, forked, load

SLOW = pytest.mark.slow


def term_the_agent(job):
    job.process.send_signal(signal.SIGTERM)


def term_the_agent_twice(job):
    term_the_agent(job)
    time.sleep(0.05)  # otherwise the system merges the two
    term_the_agent(job)


TERM = {
    "the agent": term_the_agent,
    "the agent, twice": term_the_agent_twice,
    "the first worker": lambda job: kill(job.workers()[0], signal.SIGTERM),
    "the last worker": lambda job: kill(job.workers()[max(job.workers())], signal.SIGTERM),
    "all": lambda job: [kill(process, signal.SIGTERM) for process in job.processes()],
}


def interrupted(tmp_path, job, *position):
    """Check that a job was interrupted at a position, and saved there: epochs, samples."""
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (checkpoint["EPOCHS_RUN"], checkpoint["SAMPLES_RUN"]) == position, job
    assert f"interrupted after {checkpoint['SAMPLES_RUN']:,} samples" in job.stdout, job
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    assert job.returncode != 0
    assert "accuracy" not in job.stdout


def resume(tmp_path, script, *earlier, nprocs=2):
    """Start the job again; check that the runs printed each epoch once; return the Result."""
    job = finished(forked(script, *LONG, nprocs=nprocs), tmp_path)
    assert "resuming from checkpoint.pt" in job.stdout
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert [number for run in (*earlier, job) for number in epochs(run)] == [1, 2, 3, 4]
    return job


@pytest.mark.parametrize(
    ("step", "nprocs", "whom"),
    [
        ("04", 2, "the agent, twice"),
        pytest.param("04", 2, "the first worker", marks=pytest.mark.weekly),
        pytest.param("04", 2, "all", marks=pytest.mark.weekly),
        pytest.param("04", 4, "the last worker", marks=pytest.mark.weekly),
        pytest.param("05", 2, "the agent", marks=pytest.mark.weekly),
    ],
)
def test_told_to_stop_and_started_again(trained_with, tmp_path, step, nprocs, whom):
    script = edited(tmp_path, step, at(1, 15, GATE), *exact(nprocs))
    with Job(command(script, *LONG, nprocs=nprocs), tmp_path) as job:
        wait_at_the_gate(job)
        TERM[whom](job)
        job.wait().wait_until_gone()
    interrupted(tmp_path, job, 1, 20 * 64 * nprocs)
    job = resume(tmp_path, edited(tmp_path, step, *exact(nprocs)), job, nprocs=nprocs)
    assert same_bits(job, trained_with("03", exact(nprocs), LONG, nprocs=nprocs))


@SLOW
def test_told_twice_with_4_processes(trained_with, tmp_path):
    told = at(1, 15, TOLD, ON_RANK_1), at(2, 35, TOLD, ON_RANK_1)
    script = edited(tmp_path, "04", *told, *exact(4))
    first = run(forked(script, *LONG, nprocs=4), tmp_path)
    interrupted(tmp_path, first, 1, 20 * 4 * 64)
    second = run(forked(script, *LONG, nprocs=4), tmp_path)
    interrupted(tmp_path, second, 2, 40 * 4 * 64)
    job = resume(tmp_path, script, first, second, nprocs=4)
    assert same_bits(job, trained_with("03", exact(4), LONG, nprocs=4))


@SLOW
def test_restarted_in_place(trained, tmp_path):
    """With restarts left, torchrun restarts ranks that exit with code 75."""
    script = edited(tmp_path, "04", at(1, 15, TOLD, ON_RANK_1))
    start = command(script, *LONG, torchrun=("--max-restarts=1",))
    job = finished(start, tmp_path, RESTARTS)
    assert "interrupted after" in job.stdout
    assert epochs(job) == [1, 2, 3, 4]
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert same_bits(job, trained("03", *LONG))


STEP = 2 * 64  # samples
LAST = 12_942 // STEP  # the last step of an epoch, counted from 0


@pytest.mark.parametrize(
    ("step", "saved"),
    [
        (33, (1, 40 * STEP)),  # the ranks ask each other at every tenth step
        pytest.param(LAST, (2, 0), marks=SLOW),  # the next question is in the next epoch
    ],
)
def test_the_ranks_stop_at_the_same_step(trained, tmp_path, step, saved):
    script = edited(tmp_path, "04", at(1, step, TOLD, ON_RANK_1))
    job = run(forked(script, *LONG), tmp_path)
    interrupted(tmp_path, job, *saved)
    assert "exit codes of the ranks: [75, 75]" in job.stderr
    assert same_bits(resume(tmp_path, script, job), trained("03", *LONG))


@SLOW
def test_told_after_the_last_question(trained, tmp_path):
    """No question is left in the last epoch, so the run ends normally."""
    job = finished(forked(edited(tmp_path, "04", at(3, LAST, TOLD, ON_RANK_1)), *LONG), tmp_path)
    assert "interrupted" not in job.stdout
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert accuracy(job)
    assert same_bits(job, trained("03", *LONG))


# ---------------------------------------------------------------- the sampler


def deal(world_size, samples_run, samples=1000):
    """Return the indices that are left of an epoch, for each rank."""
    module = load("04")
    shards = []
    for rank in range(world_size):
        sampler = module.ResumableSampler(range(samples), world_size, rank, seed=5)
        sampler.set_epoch(3)
        sampler.samples_run = samples_run
        shards.append(list(sampler))
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


@SLOW
def test_the_sampler_of_4096_ranks():
    """The shards can be checked without starting the ranks."""
    whole = deal(4096, 0, 12_942)
    assert {len(shard) for shard in whole} == {4}
    assert {index for shard in whole for index in shard} == set(range(12_942))
    assert deal(4096, 2 * 4096, 12_942) == [shard[2:] for shard in whole]


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1), (1, 16), (16, 7)])
def test_the_sampler_in_another_world(before, after):
    """No sample is missed. With N ranks, at most N-1 are run again, and the end is padded."""
    run = [index for shard in deal(before, 0) for index in shard[:20]]
    left = [index for shard in deal(after, len(run)) for index in shard]
    assert len(run) == len(set(run)) == 20 * before
    assert set(run + left) == set(range(1000))
    again, padding = len(run) % after, -1000 % after
    assert len(run + left) == 1000 + again + padding
