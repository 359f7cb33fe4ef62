"""Healthy runs end cleanly: no gloo thread is left at exit, atexit runs, and nothing aborts."""

import json
import shutil

import pytest
from support.jobs import finished, run
from support.positions import TOLD, at
from support.results import resumed
from support.scripts import SMALL, edited, forked, without_spawn

ONE = ("1", *SMALL)
DESTROYED = "    dist.destroy_process_group()\n"
SHOW = """
    time.sleep(1)  # Linux lists a thread for a moment after it has ended
    tasks = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print(f"left {sum('gloo' in task for task in tasks)}\\n", end="", flush=True)
"""


@pytest.fixture
def exits(tmp_path):
    """Return the environment that makes each rank list its threads at exit, and a check of it."""
    folder = tmp_path / "exits"
    folder.mkdir()

    def check(nprocs=2):
        """Check that atexit ran in each rank, and that no thread of gloo was left."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()]
        assert len(found) == nprocs
        assert all("gloo" not in name for names in found for name in names), found
        for path in folder.iterdir():
            path.unlink()

    return {"DDP_LADDER_EXITS": str(folder)}, check


@pytest.mark.slow
@pytest.mark.parametrize("step", ["02", "03", "04", "05"])
def test_no_gloo_thread_is_left_when_the_group_is_destroyed(tmp_path, exits, step):
    """Freed later, DDP would wait for gloo's threads while it holds the lock that they may need."""
    env, check = exits
    shows = (DESTROYED, DESTROYED + SHOW)
    path = without_spawn(tmp_path, shows) if step == "02" else edited(tmp_path, step, shows)
    for finished_epochs in ([], [1]):
        job = finished(forked(path, *ONE), tmp_path, env)
        assert resumed(job) == finished_epochs
        assert job.stdout.count("left 0\n") == 2, job
        check()


def test_no_gloo_thread_is_left_after_an_interruption(tmp_path, exits):
    env, check = exits
    job = run(forked(edited(tmp_path, "05", at(0, 5, TOLD)), *ONE), tmp_path, env)
    assert "exit codes of the ranks: [1, 1]" in job.stderr
    check()


@pytest.mark.weekly("exits more processes: two of each step do so above")
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("step", ["03", "04", "05"])
def test_healthy_runs_exit_with_0(trained, tmp_path, exits, step, number):
    """Eighty processes of each step in all."""
    shutil.copy(trained("03", *ONE).cwd / "checkpoint.pt", tmp_path)
    env, check = exits
    job = finished(forked(step, *ONE, nprocs=16), tmp_path, env, timeout=300)
    assert resumed(job) == [1]
    check(nprocs=16)
