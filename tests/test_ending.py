"""Healthy runs end cleanly: no gloo thread is left at exit, atexit runs, and nothing aborts."""

import json
import re
import shutil

import pytest
from support.jobs import finished, run
from support.positions import TOLD, at
from support.results import resumed
from support.scripts import ROOT, SMALL, command, edited, forked

SLOW = pytest.mark.slow
AGAIN = pytest.mark.weekly
STEPS = ["02", "03", "04", "05"]
ONE = ("1", *SMALL)


@pytest.fixture
def exits(tmp_path):
    """Return the environment that makes each rank list its threads at exit, and their reader."""
    folder = tmp_path / "exits"
    folder.mkdir()

    def threads():
        """Return the names of the threads left in each rank since the last call."""
        found = []
        for path in folder.iterdir():
            found.append(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
        return found

    return {"DDP_LADDER_EXITS": str(folder)}, threads


def check(threads, nprocs=2):
    found = threads()
    assert len(found) == nprocs  # atexit ran in each rank
    assert all("gloo" not in name for names in found for name in names), found


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=AGAIN) for n in STEPS[:-1]), "05"])
def test_no_gloo_thread_is_left(tmp_path, exits, step):
    """None is left after destroy_process_group either, because DDP was freed before.

    Freed later, DDP would wait for gloo's threads while it holds the lock that they may need.
    """
    env, threads = exits
    end = "    dist.destroy_process_group()\n"
    show = """
    time.sleep(1)  # Linux lists a thread for a moment after it has ended
    tasks = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print(f"left {sum('gloo' in task for task in tasks)}\\n", end="", flush=True)
"""
    path = edited(tmp_path, step, (end, end + show))
    if step == "02":
        start = command(path, *ONE)
        env |= {"PYTHONPATH": str(ROOT / "tests" / "support" / "exits")}
    else:
        start = forked(path, *ONE)
    for finished_epochs in ([], [1]):
        job = finished(start, tmp_path, env)
        assert resumed(job) == finished_epochs
        assert re.findall(r"^left (\d+)$", job.stdout, re.MULTILINE) == ["0", "0"]
        check(threads)


def test_no_gloo_thread_is_left_after_an_interruption(tmp_path, exits):
    env, threads = exits
    job = run(forked(edited(tmp_path, "05", at(0, 5, TOLD)), *ONE), tmp_path, env)
    assert "exit codes of the ranks: [75, 75]" in job.stderr
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    check(threads)


@pytest.mark.parametrize("nprocs", [4, *[pytest.param(16, marks=AGAIN)] * 4])
@pytest.mark.parametrize("step", [*(pytest.param(n, marks=SLOW) for n in ("03", "04")), "05"])
def test_healthy_runs_exit_with_0(trained, tmp_path, exits, step, nprocs):
    """With --everything=all, 200 processes exit."""
    shutil.copy(trained("03", *ONE).cwd / "checkpoint.pt", tmp_path)
    env, threads = exits
    job = finished(forked(step, *ONE, nprocs=nprocs), tmp_path, env, timeout=300)
    assert resumed(job) == [1]
    check(threads, nprocs)
