"""Step 4: nodes that a scheduler lends and takes back. Here, a node is a torchrun of its own."""

import shutil

import pytest
import torch
from support.jobs import finished, run
from support.positions import ON_RANK_1, SIGTERM, at
from support.results import epochs, resumed, same_bits
from support.scripts import FOUR_EPOCHS, edited, forked, load

SLOW = pytest.mark.slow
STEP = 2 * 128  # samples of both ranks
LAST = 12_942 // STEP  # the last step of an epoch, counted from 0


def test_only_rank_0_prints_and_saves(trained):
    job = trained("04", *FOUR_EPOCHS)
    assert job.stdout.startswith("world size 2 on the CPU\n")
    assert len(job.stdout.splitlines()) == 6  # this one, four epochs and the accuracy
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
    assert resumed(disturbed()) == [1]
    assert epochs(disturbed()) == [1, 2]


def test_told_to_stop_it_loses_no_step(disturbed, trained, tmp_path):
    """Torchrun also told the workers of the DataLoader; without workers, the bits are the same."""
    job = disturbed()
    assert "interrupted after 5,120 samples of the epoch" in job.stdout
    shutil.copy(job.cwd / "checkpoint.pt", tmp_path)
    again = finished(forked("04", *FOUR_EPOCHS), tmp_path)
    assert resumed(again) == [2]
    assert epochs(again) == [3, 4]
    assert same_bits(again, trained("03", *FOUR_EPOCHS))


@pytest.mark.parametrize(
    "told",
    [
        {"at": (1, 33), "saved": (1, 40 * STEP)},
        pytest.param({"at": (1, LAST), "saved": (2, 0)}, marks=SLOW),  # votes in the next epoch
    ],
)
def test_all_ranks_stop_at_the_same_step_and_exit_with_1(trained, tmp_path, told):
    """Rank 1 is told at an epoch and step. At every tenth step of an epoch, the ranks vote."""
    script = edited(tmp_path, "04", at(*told["at"], SIGTERM, ON_RANK_1))
    job = run(forked(script, *FOUR_EPOCHS), tmp_path)
    assert "exit codes of the ranks: [1, 1]" in job.stderr, job
    assert "accuracy" not in job.stdout
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == told["saved"]
    again = finished(forked("04", *FOUR_EPOCHS), tmp_path)
    assert same_bits(again, trained("03", *FOUR_EPOCHS))


# ---------------------------------------------------------------- the sampler


def deal(world_size, samples_run):
    """Return the indices that are left of an epoch of 1000 samples, for each rank."""
    module = load("04")
    shards = []
    for rank in range(world_size):
        sampler = module.ResumableSampler(range(1000), world_size, rank, seed=5)
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
