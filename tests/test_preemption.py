"""Steps 4 and 5 are told to stop: they save in mid-epoch, exit, and resume with the same bits."""

import re
import signal
import time

import pytest
import torch
from support.jobs import RESTARTS, Job, finished, kill
from support.results import accuracy, epochs, same_bits
from support.scripts import LONG, command, edited, load

EVERYTHING = pytest.mark.everything


def term_the_agent(job):
    job.process.send_signal(signal.SIGTERM)


def term_the_agent_twice(job):
    term_the_agent(job)
    time.sleep(0.05)  # or the system merges the two
    term_the_agent(job)


TERM = {
    "the agent": term_the_agent,
    "the agent, twice": term_the_agent_twice,
    "the first worker": lambda job: kill(job.workers()[0], signal.SIGTERM),
    "the last worker": lambda job: kill(job.workers()[max(job.workers())], signal.SIGTERM),
    "all": lambda job: [kill(process, signal.SIGTERM) for process in job.processes()],
}


def interrupt(tmp_path, start, after, stop):
    """Stop a job some steps after a line of its output, and check what it leaves behind."""
    with Job(start, tmp_path) as job:
        job.wait_for(after)
        time.sleep(0.1)
        stop(job)
        job.wait().wait_until_gone()
    return interrupted(tmp_path, job)


def interrupted(tmp_path, job):
    """Check that a job was interrupted inside an epoch, and that its position was saved."""
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert 0 <= checkpoint["SAMPLES_RUN"] < 12_942, job
    assert f"interrupted after {checkpoint['SAMPLES_RUN']:,} samples" in job.stdout, job
    assert checkpoint["EPOCHS_RUN"] == max(epochs(job))
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    assert job.returncode != 0
    assert "accuracy" not in job.stdout
    return job


def resume(tmp_path, start, *earlier):
    """Start the job again, and check that all runs together printed each epoch once."""
    job = finished(start, tmp_path)
    assert "resuming from checkpoint.pt" in job.stdout
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert [number for run in (*earlier, job) for number in epochs(run)] == [1, 2, 3, 4]
    return job


@pytest.mark.parametrize(
    ("step", "nprocs", "whom"),
    [
        ("04", 2, "the agent, twice"),
        pytest.param("04", 2, "the first worker", marks=EVERYTHING),
        pytest.param("04", 2, "all", marks=EVERYTHING),
        pytest.param("04", 4, "the last worker", marks=EVERYTHING),
        pytest.param("05", 2, "the agent", marks=EVERYTHING),
    ],
)
def test_told_to_stop_and_started_again(trained, tmp_path, step, nprocs, whom):
    start = command(step, *LONG, nprocs=nprocs)
    job = interrupt(tmp_path, start, "^epoch 1 ", TERM[whom])
    job = resume(tmp_path, start, job)
    assert same_bits(job, trained("03", *LONG, nprocs=nprocs))


@EVERYTHING
def test_told_twice_with_4_processes(trained, tmp_path):
    start = command("04", *LONG, nprocs=4)
    first = interrupt(tmp_path, start, "^epoch 1 ", term_the_agent)
    second = interrupt(tmp_path, start, f"^epoch {max(epochs(first)) + 1} ", term_the_agent)
    job = resume(tmp_path, start, first, second)
    assert same_bits(job, trained("03", *LONG, nprocs=4))


@EVERYTHING
def test_restarted_in_place(trained, tmp_path):
    """With restarts left, torchrun restarts workers that exit with code 75."""
    start = command("04", *LONG, torchrun=("--max-restarts=1",))
    with Job(start, tmp_path, RESTARTS) as job:
        job.wait_for("^epoch 1 ")
        TERM["the first worker"](job)
        assert job.wait().returncode == 0, job
        job.wait_until_gone()
    assert "interrupted after" in job.stdout
    assert epochs(job) == [1, 2, 3, 4]
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert same_bits(job, trained("03", *LONG))


def told_at(tmp_path, epochs_run, samples_run):
    """Start a copy of step 4 in which the last rank gets SIGTERM at this position."""
    line = "            total[0] += self._run_batch(source, targets)\n"
    here = "(self.epochs_run, self.samples_run, dist.get_rank())"
    told = f"""            if {here} == ({epochs_run}, {samples_run}, 1):
                signal.raise_signal(signal.SIGTERM)
"""
    return command(edited(tmp_path, "04", (line, told + line)), *LONG)


STEP = 2 * 64  # samples
LAST = 12_942 // STEP  # the last step of an epoch, counted from 0


@pytest.mark.parametrize(
    ("step", "saved"),
    [
        (33, (1, 40 * STEP)),  # the ranks ask each other at every tenth step
        pytest.param(LAST, (2, 0), marks=EVERYTHING),  # they ask next in the next epoch
    ],
)
def test_the_ranks_stop_at_the_same_step(trained, tmp_path, step, saved):
    start = told_at(tmp_path, 1, step * STEP)
    with Job(start, tmp_path) as job:
        job.wait().wait_until_gone()
    interrupted(tmp_path, job)
    codes = re.findall(r"exitcode +: (-?\d+)", job.stderr)
    assert "75" in codes
    assert set(codes) <= {"75", "-15"}  # torchrun may signal a rank that is already exiting
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (checkpoint["EPOCHS_RUN"], checkpoint["SAMPLES_RUN"]) == saved
    assert same_bits(resume(tmp_path, start, job), trained("03", *LONG))


@EVERYTHING
def test_told_after_the_last_question(trained, tmp_path):
    """Fewer than ten steps are left, so the run ends normally."""
    job = finished(told_at(tmp_path, 3, LAST * STEP), tmp_path)
    assert "interrupted" not in job.stdout
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()
    assert accuracy(job)
    assert same_bits(job, trained("03", *LONG))


# ---------------------------------------------------------------- the sampler


def deal(world_size, samples_run, samples=1000):
    """Return what is left of an epoch, for each rank."""
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


@EVERYTHING
def test_the_sampler_of_4096_ranks():
    """Its shards can be checked without starting the ranks."""
    whole = deal(4096, 0, 12_942)
    assert {len(shard) for shard in whole} == {4}
    assert {index for shard in whole for index in shard} == set(range(12_942))
    assert deal(4096, 2 * 4096, 12_942) == [shard[2:] for shard in whole]


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1), (1, 16), (16, 7)])
def test_the_sampler_in_another_world(before, after):
    """No sample is missed. At most N-1 of N ranks run one again, and the end is padded."""
    run = [index for shard in deal(before, 0) for index in shard[:20]]
    left = [index for shard in deal(after, len(run)) for index in shard]
    assert len(run) == len(set(run)) == 20 * before
    assert set(run + left) == set(range(1000))
    again, padding = len(run) % after, -1000 % after
    assert len(run + left) == 1000 + again + padding
