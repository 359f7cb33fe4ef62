"""Healthy runs end well: no thread of gloo is left at exit, atexit runs, and nothing aborts."""

import json
import re
import shutil
import signal
import sys

import pytest
from support.jobs import Job, finished, free_port
from support.results import resumed
from support.scripts import SCRIPT, SMALL, command, edited

EVERYTHING = pytest.mark.everything
STEPS = ["02", "03", "04", "05"]
ONE = ("1", *SMALL)
SITE = """  # Python runs a sitecustomize.py that it finds on PYTHONPATH before any script
import atexit, json, multiprocessing, os, sys, time


def report():
    # Called after all other atexit functions, because it is registered before them.
    if "RANK" in os.environ or multiprocessing.parent_process():  # not torchrun, not 02's parent
        time.sleep(1)  # Linux lists a thread for a moment after it has ended
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


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=EVERYTHING) for n in STEPS[:-1]), "05"])
def test_no_gloo_thread_is_left(tmp_path, exits, step):
    """Nor is one left after destroy_process_group, because DDP was freed before.

    DDP, freed later, would wait for gloo's threads and hold the lock that they may need.
    """
    env, threads = exits
    end = "    dist.destroy_process_group()\n"
    show = """
    time.sleep(1)  # Linux lists a thread for a moment after it has ended
    tasks = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print(f"left {sum('gloo' in task for task in tasks)}\\n", end="", flush=True)
"""
    start = command(edited(tmp_path, step, (end, end + show)), *ONE)
    for finished_epochs in ([], [1]):
        job = finished(start, tmp_path, env)
        assert resumed(job) == finished_epochs
        assert re.findall(r"^left (\d+)$", job.stdout, re.MULTILINE) == ["0", "0"]
        check(threads)


def test_no_gloo_thread_is_left_after_an_interruption(tmp_path, exits):
    env, threads = exits
    with Job(command("05", "99", *SMALL), tmp_path, env) as job:
        job.wait_for("^epoch 1 ")
        for worker in job.workers().values():
            worker.send_signal(signal.SIGTERM)
        job.wait(60).wait_until_gone()
    assert "exitcode  : 75" in job.stderr
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    check(threads)


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
@pytest.mark.parametrize("step", [*(pytest.param(n, marks=EVERYTHING) for n in ("03", "04")), "05"])
def test_healthy_runs_exit_with_0(trained, tmp_path, exits, step, nprocs):
    """200 exits with --everything; the ranks are forked, which spares each the slow imports."""
    shutil.copy(trained("03", *ONE).cwd / "checkpoint.pt", tmp_path)
    env, threads = exits
    port = free_port()
    env |= {"WORLD_SIZE": str(nprocs), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    job = finished([sys.executable, "-c", FORK, SCRIPT[step], *ONE], tmp_path, env, timeout=300)
    assert resumed(job) == [1]
    check(threads, nprocs)
