"""Step 2: one process per GPU, or two on a CPU."""

import re
import sys

import pytest
import torch
from support.jobs import Job, finished
from support.positions import GATE, at, wait_at_the_gate
from support.results import accuracy, epochs, losses, printed_by, resumed, same_bits, shape, weights
from support.scripts import DOUBLE, FOUR_EPOCHS, NARROW, ROOT, command, edited, forked, load


def test_it_reads_98_percent_of_digits_that_it_has_never_seen(trained):
    assert accuracy(trained("02"))[0] >= 98


def test_only_rank_0_prints_and_saves(trained):
    job = trained("02")
    assert job.stdout.startswith("world size 2 on the CPU\n")
    assert len(job.stdout.splitlines()) == 6  # this one, four epochs and the accuracy
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


def test_the_front_page_shows_what_it_prints(trained):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    printed = trained("02").stdout
    assert shape(printed) == shape(shown)
    wanted, found = (re.findall(r"loss ([\d.]+)", text) for text in (shown, printed))
    assert [*map(float, found)] == pytest.approx([*map(float, wanted)], rel=0.03)  # CPUs differ


def test_it_saves_names_without_ddps_prefix(trained):
    assert weights(trained("02")).keys() == load("02").build_model(32).state_dict().keys()


def test_the_ranks_share_the_cores_and_end_with_equal_weights(spawned):
    job = spawned()
    (threads_0, bits_0), (threads_1, bits_1) = printed_by(job, 0), printed_by(job, 1)
    assert threads_0 == threads_1 == "1"  # of two cores
    assert bits_0 == bits_1


def test_it_resumes_and_ends_with_the_bits_of_an_undisturbed_run(trained, tmp_path):
    finished(forked("02", "2", *NARROW), tmp_path)
    job = finished(forked("02", *FOUR_EPOCHS), tmp_path)
    assert resumed(job) == [2]
    assert epochs(job) == [3, 4]
    assert same_bits(job, trained("03", *FOUR_EPOCHS))


@pytest.mark.parametrize("nprocs", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_n_processes_follow_one_with_n_times_the_batch(trained_with, nprocs):
    """Both run in double precision. The printed loss, a mean over all ranks, is the same, too."""
    args = ("1", "--width=2", "--batch-size")
    many = trained_with("02", DOUBLE, (*args, "64"), nprocs=nprocs)
    one = trained_with("02", DOUBLE, (*args, str(64 * nprocs)), nprocs=1)
    assert not same_bits(many, one)
    for name, tensor in weights(many).items():
        assert (tensor - weights(one)[name]).abs().max() < 1e-9
    assert losses(many) == losses(one)


@pytest.mark.parametrize(("gpus", "nprocs"), [(0, 2), (3, 3)])
def test_it_starts_one_process_per_gpu_or_two_on_a_cpu(monkeypatch, gpus, nprocs):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["02_multigpu_spawn.py"])
    assert load("02").parse_args().nprocs == nprocs


@pytest.mark.slow
def test_two_copies_run_at_the_same_time(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    waits = edited(tmp_path, "02", at(0, 5, GATE))
    with Job(command(waits, "1", *NARROW, nprocs=1), tmp_path) as job:
        gate = wait_at_the_gate(job)
        finished(command("02", "1", *NARROW, nprocs=1), other)
        gate.touch()
        assert job.wait().returncode == 0, job
