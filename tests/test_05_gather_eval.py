"""Step 5: all ranks evaluate together, with the result of a single process."""

import shutil

import pytest
from support.jobs import finished
from support.results import accuracy, check_report, epochs, resumed, same_bits
from support.scripts import LONG, SCRIPT, forked, load


def test_it_reads_98_percent_of_digits_that_it_has_never_seen(launched):
    assert accuracy(launched("05"))[0] >= 98


def test_only_rank_0_prints_and_saves(launched):
    job = launched("05")
    assert epochs(job) == [1, 2, 3, 4]
    assert job.stdout.count("accuracy ") == 2  # the report has one, too
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    "nprocs", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))]
)
def test_it_evaluates_each_sample_once_at_any_world_size(trained, tmp_path, nprocs):
    """With the weights of a finished run, so nothing is left to train."""
    shutil.copy(trained("05", *LONG).cwd / "checkpoint.pt", tmp_path)
    job = finished(forked(SCRIPT["05"], *LONG, nprocs=nprocs), tmp_path)
    check_report(job)
    assert accuracy(job) == accuracy(trained("05", *LONG))


def test_a_padded_evaluation_would_count_some_twice():
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


def test_it_survives_a_kill(disturbed):
    first, *_ = disturbed("05")
    assert resumed(first) == [1]
    assert epochs(first) == [1, 2]


def test_told_to_stop_it_loses_no_step(disturbed, trained):
    _, saved, again = disturbed("05")
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (2, 20 * 128)
    assert epochs(again) == [3, 4]
    assert same_bits(again, trained("03", *LONG))
