"""Step 5: all ranks evaluate together, with the same result as a single process."""

import shutil

import pytest
from support.jobs import finished
from support.results import accuracy, check_report
from support.scripts import LONG, SCRIPT, SMALL, edited, forked, load


def test_two_processes(trained):
    check_report(trained("05", *LONG))


@pytest.mark.parametrize(
    "nprocs", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))]
)
def test_exact_at_any_world_size(trained, tmp_path, nprocs):
    """With the weights of a finished run, so nothing is left to train."""
    shutil.copy(trained("05", *LONG).cwd / "checkpoint.pt", tmp_path)
    job = finished(forked(SCRIPT["05"], *LONG, nprocs=nprocs), tmp_path)
    check_report(job)
    assert accuracy(job) == accuracy(trained("05", *LONG))


@pytest.mark.slow
def test_all_ranks_evaluate_or_they_wait_for_each_other(tmp_path):
    """A collective that some rank does not call would fail after this short timeout."""
    short = edited(tmp_path, "05", ("timedelta(minutes=5)", "timedelta(seconds=20)"))
    assert accuracy(finished(forked(short, "1", *SMALL), tmp_path))[2] == 359


def test_padding_would_count_some_digits_twice():
    module = load("05")
    test_set = module.load_datasets()[1]
    padded = [
        index
        for rank in range(2)
        for index in module.DistributedSampler(test_set, 2, rank, shuffle=False)
    ]
    assert len(padded) == 360
    assert sorted(padded)[:2] == [0, 0]
    for world_size in (*range(1, 17), 359, 400):
        shards = [range(rank, 359, world_size) for rank in range(world_size)]
        assert sorted(index for shard in shards for index in shard) == list(range(359))
