"""Step 3: torchrun starts the processes, and restarts them after a crash."""

import re
import shutil

import pytest
from support.jobs import RESTARTS, finished, run
from support.positions import KILLED, ON_RANK_1, RANK_1_LOOKS_ELSEWHERE, at
from support.results import epochs, resumed, same_bits
from support.scripts import FOUR_EPOCHS, NARROW, command, edited, exact, forked


def test_only_rank_0_prints_and_saves(trained):
    job = trained("03", *FOUR_EPOCHS)
    assert job.stdout.startswith("world size 2 on the CPU\n")
    assert len(job.stdout.splitlines()) == 6  # this one, four epochs and the accuracy
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_survives_a_kill_and_ends_with_the_bits_of_an_undisturbed_run(
    trained, tmp_path, torchrun
):
    """Rank 1 is killed in the middle of the second epoch: the first is not repeated."""
    script = edited(tmp_path, "03", at(1, 20, KILLED, ON_RANK_1))
    if torchrun:
        start = command(script, *FOUR_EPOCHS, torchrun=("--max-restarts=1",))
    else:
        start = forked(script, *FOUR_EPOCHS, restarts=1)
    job = finished(start, tmp_path, RESTARTS)
    assert resumed(job) == [1]
    assert epochs(job) == [1, 2, 3, 4]
    assert same_bits(job, trained("03", *FOUR_EPOCHS))


def test_it_refuses_a_broken_checkpoint_and_torchrun_says_why(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    job = run(command("03", "1", *NARROW, nprocs=1), tmp_path)
    assert job.returncode == 1
    report = job.stderr.split("Root Cause (first observed failure):")[1]
    assert "RuntimeError: cannot load checkpoint.pt, move it away: " in report
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"not a checkpoint"


@pytest.mark.parametrize("step", ["03", "04"])
def test_ranks_that_do_not_all_see_the_checkpoint_end_at_once(trained, tmp_path, step):
    shutil.copy(trained("03", *FOUR_EPOCHS).cwd / "checkpoint.pt", tmp_path)
    script = edited(tmp_path, step, RANK_1_LOOKS_ELSEWHERE)
    job = run(forked(script, *FOUR_EPOCHS), tmp_path, timeout=60)
    sample = "" if step == "03" else ", sample 0"
    starts = {0: f"after epoch 4{sample}", 1: f"after epoch 0{sample}"}
    error = f"RuntimeError: the ranks start {starts}: all must see the same checkpoint.pt"
    errors = re.findall(r"\w+Error: the ranks .*", job.stderr)
    assert {*errors} == {error, f"{error}1"}
    assert epochs(job) == []


@pytest.mark.slow
def test_it_survives_a_kill_with_4_processes(trained_with, tmp_path):
    """With the lines of more/recipes/bitwise_resume.md, the bits are the same at any world size."""
    kill = at(1, 20, KILLED, when="dist.get_rank() == 3")
    start = forked(edited(tmp_path, "03", kill, *exact(4)), *FOUR_EPOCHS, nprocs=4, restarts=1)
    job = finished(start, tmp_path)
    assert resumed(job) == [1]
    assert same_bits(job, trained_with("03", exact(4), FOUR_EPOCHS, nprocs=4))
