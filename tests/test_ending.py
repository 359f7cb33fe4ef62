"""Healthy runs end well: no thread of gloo is left at exit, atexit runs, and nothing aborts."""

import json
import re
import shutil
import signal
import sys

import pytest
from conftest import SCRIPT, SMALL, Job, command, edited, finished, free_port, resumed

EVERYTHING = pytest.mark.everything
STEPS = ["02", "03", "04", "05"]
ONE = ("1", *SMALL)
SITE = """  # Python runs a sitecustomize.py that it finds on PYTHONPATH before any script
import atexit, json, multiprocessing, os, sys


def report():
    # Called after all other atexit functions, because it is registered before them.
    if "RANK" in os.environ or multiprocessing.parent_process():  # not torchrun, not 02's parent
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
        with open(f"{os.environ['DDP_LADDER_EXITS']}/{os.getpid()}", "w") as file:
            json.dump(names, file)


atexit.register(report)
"""


@pytest.fixture
def exits(tmp_path):
    """Let each rank list its threads at exit; return the environment and a function to read."""
    site, folder = tmp_path / "site", tmp_path / "exits"
    site.mkdir()
    folder.mkdir()
    (site / "sitecustomize.py").write_text(SITE, encoding="utf-8")

    def threads():
        """Return the names of the threads that were left in each rank, and forget them."""
        found = []
        for path in folder.iterdir():
            found.append(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
        return found

    return {"PYTHONPATH": str(site), "DDP_LADDER_EXITS": str(folder)}, threads


def check(threads, nprocs=2):
    found = threads()
    assert len(found) == nprocs  # as many atexit functions ran
    assert all("gloo" not in name for names in found for name in names), found


@pytest.mark.parametrize("step", STEPS)
def test_no_gloo_thread_is_left(tmp_path, exits, step):
    env, threads = exits
    finished(command(step, *ONE), tmp_path, env)
    check(threads)
    assert resumed(finished(command(step, *ONE), tmp_path, env)) == [1]
    check(threads)


@pytest.mark.parametrize("step", ["04", pytest.param("05", marks=EVERYTHING)])
def test_no_gloo_thread_is_left_after_an_interruption(tmp_path, exits, step):
    env, threads = exits
    with Job(command(step, "99", *SMALL), tmp_path, env) as job:
        job.wait_for("^epoch 1 ")
        for worker in job.workers().values():
            worker.send_signal(signal.SIGTERM)
        job.wait(60).wait_until_gone()
    assert "exitcode  : 75" in job.stderr
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    check(threads)


@pytest.mark.parametrize("step", STEPS)
def test_the_group_ends_with_destroy_process_group(tmp_path, step):
    """DDP, freed after the group, would wait for gloo's threads and hold the lock they may need."""
    end = "    dist.destroy_process_group()\n"
    show = """
    tasks = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print(f"left {sum('gloo' in task for task in tasks)}\\n", end="", flush=True)
"""
    job = finished(command(edited(tmp_path, step, (end, end + show)), *ONE), tmp_path)
    assert re.findall(r"^left (\d+)$", job.stdout, re.MULTILINE) == ["0", "0"]


FORK = """
import os, runpy, sys

import sklearn.datasets, sklearn.metrics, torch, torch._dynamo

for rank in range(int(os.environ["WORLD_SIZE"])):
    if os.fork() == 0:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(os.environ["WORLD_SIZE"]))]
sys.exit(codes.count(0) != len(codes))
"""


@pytest.mark.parametrize("nprocs", [4, *[pytest.param(16, marks=EVERYTHING)] * 4])
@pytest.mark.parametrize("step", ["03", "04", "05"])
def test_healthy_runs_exit_with_0(trained, tmp_path, exits, step, nprocs):
    """200 exits with --everything; the ranks are forked, which spares each the slow imports."""
    shutil.copy(trained("02", *ONE).cwd / "checkpoint.pt", tmp_path)
    env, threads = exits
    port = str(free_port())
    env |= {"WORLD_SIZE": str(nprocs), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    job = finished([sys.executable, "-c", FORK, SCRIPT[step], *ONE], tmp_path, env, timeout=300)
    assert resumed(job) == [1]
    check(threads, nprocs)
