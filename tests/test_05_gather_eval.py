"""Step 5: all ranks evaluate together, with the result of a single process."""

import shutil

import pytest
from sklearn.metrics import classification_report
from support.jobs import finished, run
from support.positions import KILLED, ON_RANK_1, SIGTERM, at
from support.results import accuracy, epochs, resumed, same_bits, weights
from support.scripts import FOUR_EPOCHS, edited, forked, load


def test_only_rank_0_prints_and_saves(trained):
    job = trained("05", *FOUR_EPOCHS)
    assert job.stdout.startswith("world size 2 on the CPU\n")
    assert job.stdout.count("epoch ") == 4
    assert job.stdout.count("accuracy ") == 2  # the report has one, too
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


@pytest.mark.parametrize(
    "nprocs", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))]
)
def test_it_evaluates_each_sample_once_at_any_world_size(trained, tmp_path, nprocs):
    """The run resumes a finished one and only evaluates. The test evaluates the weights itself."""
    shutil.copy(trained("05", *FOUR_EPOCHS).cwd / "checkpoint.pt", tmp_path)
    job = finished(forked("05", *FOUR_EPOCHS, nprocs=nprocs), tmp_path)
    assert epochs(job) == []
    model = load("05").build_model(width=4)
    model.load_state_dict(weights(job))
    images, labels = load("05").load_datasets()[1].tensors
    predictions = model(images).argmax(dim=1)
    assert accuracy(job)[1:] == (int((predictions == labels).sum()), 359)
    assert classification_report(labels, predictions, zero_division=0) in job.stdout


@pytest.mark.slow
def test_it_survives_a_kill_and_loses_no_step_when_told_to_stop(trained, tmp_path):
    """It is killed in the second epoch, restarted, and told to stop in the third."""
    disturbances = at(1, 20, KILLED, ON_RANK_1), at(2, 15, SIGTERM, ON_RANK_1)
    script = edited(tmp_path, "05", *disturbances)
    job = run(forked(script, *FOUR_EPOCHS, restarts=1), tmp_path)
    assert resumed(job) == [1]
    assert epochs(job) == [1, 2]
    assert "interrupted after 5,120 samples of the epoch" in job.stdout, job
    assert "accuracy" not in job.stdout
    again = finished(forked("05", *FOUR_EPOCHS), tmp_path)
    assert epochs(again) == [3, 4]
    assert same_bits(again, trained("05", *FOUR_EPOCHS))
