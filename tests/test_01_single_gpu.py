"""Step 1: one process."""

import re
import shutil

import pytest
import torch
from support.jobs import finished
from support.results import accuracy, epochs, resumed, same_bits
from support.scripts import FOUR_EPOCHS, NARROW, command, forked, load


def test_it_reads_98_percent_of_digits_that_it_has_never_seen(tmp_path):
    percent, _, digits = accuracy(finished(command("01"), tmp_path))
    assert percent >= 98
    assert digits == 359


def test_it_prints_where_it_runs_and_a_line_for_each_epoch_and_the_accuracy(trained):
    first, *lines, last = trained("01", *FOUR_EPOCHS).stdout.splitlines()
    assert first == "on the CPU"
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"epoch {number}  loss \d\.\d{{4}}  [\d,]+ samples/s", line)
    assert len(lines) == 4
    assert re.fullmatch(r"accuracy \d+\.\d\d% \(\d+/359\)", last)


def test_it_resumes_and_ends_with_the_bits_of_an_undisturbed_run(trained, tmp_path):
    shutil.copy(trained("01", "2", *NARROW).cwd / "checkpoint.pt", tmp_path)
    job = finished(forked("01", *FOUR_EPOCHS), tmp_path)
    assert resumed(job) == [2]
    assert epochs(job) == [3, 4]
    assert same_bits(job, trained("01", *FOUR_EPOCHS))


def test_no_held_out_digit_is_trained_on():
    train, test = load("01").load_datasets()
    assert (len(train), len(test)) == (12_942, 359)
    images = train.tensors[0]
    assert (images.min(), images.max()) == (0, 1)
    nine = images.reshape(9, 1438, 1, 8, 8)
    unshifted, shifted_left_and_up = nine[4], nine[8]
    assert torch.equal(shifted_left_and_up[:, :, :7, :7], unshifted[:, :, 1:, 1:])
    assert torch.equal(train.tensors[1].reshape(9, 1438), train.tensors[1][:1438].expand(9, -1))
    held_out = {image.numpy().tobytes() for image in test.tensors[0]}
    assert not held_out & {image.numpy().tobytes() for image in unshifted}


@pytest.mark.weekly("fifteen whole trainings")
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_98_percent_with_each_seed_and_number_of_processes(tmp_path, seed, nprocs):
    step = "01" if nprocs == 1 else "03"
    job = finished(forked(step, f"--seed={seed}", nprocs=nprocs), tmp_path)
    assert accuracy(job)[0] >= 98
