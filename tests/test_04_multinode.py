"""Step 4: nodes that a scheduler lends and takes back. Here, a node is a torchrun of its own."""

import pytest
import torch
from support.jobs import finished, run
from support.positions import ON_RANK_1, TOLD, at
from support.results import accuracy, epochs, resumed, same_bits
from support.scripts import FOUR_EPOCHS, edited, exact, forked, load

SLOW = pytest.mark.slow
STEP = 2 * 128  # samples of both ranks
LAST = 12_942 // STEP  # the last step of an epoch, counted from 0


def test_only_rank_0_prints_and_saves(trained):
    job = trained("04", *FOUR_EPOCHS)
    assert job.stdout.startswith("world size 2 on the CPU\n")
    assert epochs(job) == [1, 2, 3, 4]
    assert len(job.stdout.splitlines()) == 6
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


def test_it_runs_on_two_nodes_that_meet_at_one_address(two_nodes):
    """Each node is a torchrun with one process. They share only the folder of the checkpoint."""
    jobs = two_nodes(1)
    assert [job.returncode for job in jobs] == [0, 0], jobs
    (output,) = [job.stdout for job in jobs if job.stdout]  # only rank 0 prints
    assert output.startswith("world size 2 on the CPU\n")
    assert output.count("epoch ") == 4
    left = sorted(path.name for path in jobs[0].cwd.parent.rglob("[!.]*"))
    assert left == ["checkpoint.pt", "node0", "node1"]


# ---------------------------------------------------------------- killed, told to stop


def test_it_survives_a_kill(disturbed):
    """Torchrun restarted all ranks: the first epoch is not repeated."""
    job, _ = disturbed()
    assert resumed(job) == [1]
    assert epochs(job) == [1, 2]


def test_told_to_stop_it_saves_in_mid_epoch_and_says_so(disturbed):
    """All ranks stop after the same step: the next one at which they ask each other."""
    job, saved = disturbed()
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (2, 20 * STEP)
    assert "interrupted after 5,120 samples of the epoch" in job.stdout
    assert job.returncode == 1
    assert "accuracy" not in job.stdout


def test_told_to_stop_it_loses_no_step(disturbed, trained, tmp_path):
    """Torchrun also told the workers of the DataLoader; without workers, the bits are the same."""
    _, saved = disturbed()
    torch.save(saved, tmp_path / "checkpoint.pt")
    job = finished(forked("04", *FOUR_EPOCHS), tmp_path)
    assert resumed(job) == [2]
    assert epochs(job) == [3, 4]
    assert same_bits(job, trained("03", *FOUR_EPOCHS))


@pytest.mark.parametrize(
    ("told_at", "saved_at"),
    [
        ((1, 33), (1, 40 * STEP)),
        pytest.param((1, LAST), (2, 0), marks=SLOW),  # the next vote is in the next epoch
    ],
)
def test_all_ranks_stop_at_the_same_step_and_exit_with_1(trained, tmp_path, told_at, saved_at):
    """Rank 1 is told at an epoch and step. At every tenth step of an epoch, the ranks vote."""
    script = edited(tmp_path, "04", at(*told_at, TOLD, ON_RANK_1))
    job = run(forked(script, *FOUR_EPOCHS), tmp_path)
    assert "exit codes of the ranks: [1, 1]" in job.stderr, job
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == saved_at
    again = finished(forked("04", *FOUR_EPOCHS), tmp_path)
    assert same_bits(again, trained("03", *FOUR_EPOCHS))


@SLOW
def test_told_after_the_last_vote_it_trains_to_the_end(trained, tmp_path):
    script = edited(tmp_path, "04", at(3, LAST, TOLD, ON_RANK_1))
    job = finished(forked(script, *FOUR_EPOCHS), tmp_path)
    assert accuracy(job)
    assert same_bits(job, trained("03", *FOUR_EPOCHS))


@SLOW
def test_told_twice_with_4_processes_it_loses_no_step(trained_with, tmp_path):
    told = at(1, 15, TOLD, ON_RANK_1), at(2, 11, TOLD, ON_RANK_1)
    start = forked(edited(tmp_path, "04", *told, *exact(4)), *FOUR_EPOCHS, nprocs=4)
    for epochs_run in (1, 2):
        assert run(start, tmp_path).returncode != 0
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (epochs_run, 20 * 2 * STEP)
    job = finished(start, tmp_path)
    assert same_bits(job, trained_with("03", exact(4), FOUR_EPOCHS, nprocs=4))


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
        assert len(sampler) == len(shards[-1])
    assert len({len(shard) for shard in shards}) == 1
    return shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_its_sampler_goes_on_where_it_was(world_size):
    distributed = load("04").DistributedSampler
    for rank, shard in enumerate(deal(world_size, 0)):
        whole = distributed(range(1000), world_size, rank, seed=5)
        whole.set_epoch(3)
        assert shard == list(whole)
        for steps in (1, 10, len(shard) - 1):
            assert deal(world_size, steps * world_size)[rank] == shard[steps:]


def test_the_length_of_its_loader_is_what_is_left_of_the_epoch():
    module = load("04")
    sampler = module.ResumableSampler(range(12_942), 2, 0)
    sampler.samples_run = 49 * STEP
    loader = torch.utils.data.DataLoader(range(12_942), 128, sampler=sampler)
    assert len(loader) == len(list(loader)) == 2  # 51 in a whole epoch


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1), (1, 16), (16, 7)])
def test_its_sampler_misses_no_sample_at_another_world_size(before, after):
    """With N ranks, at most N-1 are run again, and the end is padded."""
    run = [index for shard in deal(before, 0) for index in shard[:20]]
    left = [index for shard in deal(after, len(run)) for index in shard]
    assert len(run) == len(set(run)) == 20 * before
    assert set(run + left) == set(range(1000))
    again, padding = len(run) % after, -1000 % after
    assert len(run + left) == 1000 + again + padding


# ---------------------------------------------------------------- two nodes


@SLOW
def test_two_nodes_of_two_are_one_of_four_bit_for_bit(two_nodes, trained):
    node, _ = two_nodes(2)
    assert same_bits(node.cwd.parent / "checkpoint.pt", trained("03", *FOUR_EPOCHS, nprocs=4))
