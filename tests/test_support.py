"""The tests' own tools: no process is left behind, and no test is left out."""

import os
import re
import signal
import sys
import time

import psutil
import pytest
from support import server
from support.jobs import Job, finished, run
from support.scripts import ROOT

RANK = """
import os, subprocess, sys, time

print(os.getpid(), flush=True)
"""
SLEEPS = f"{RANK}time.sleep(600)"


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a program and returns its path."""

    def write(text, name="program.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def pids(job, count):
    """Wait until `count` process IDs are printed; return them."""
    job.wait_for(lambda: len(job.stdout.split()) == count)
    return [int(word) for word in job.stdout.split()]


def wait_until_gone(*pids):
    end = time.monotonic() + 60
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


# ---------------------------------------------------------------- forked ranks


@pytest.mark.parametrize(
    ("end", "nprocs", "code"),
    [
        ("sys.exit(75)", 0, 75),
        ("os.kill(os.getpid(), 9)", 0, -9),
        ("", 0, 0),
        ("sys.exit(3 * int(os.environ['RANK']))", 2, 1),
        ("", 2, 0),
    ],
)
def test_a_forked_run_ends_as_its_ranks_do(program, tmp_path, end, nprocs, code):
    job = run(server.command(program(RANK + end), nprocs=nprocs), tmp_path)
    assert job.returncode == code
    assert len(set(job.stdout.split())) == max(nprocs, 1)
    assert ("exit codes of the ranks" in job.stderr) == (code == 1)


def test_it_is_restarted_until_it_succeeds(program, tmp_path):
    count = "print(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    end = "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '1')"
    job = finished(server.command(program(f"import os, sys\n{count}{end}"), restarts=3), tmp_path)
    assert job.stdout.split() == ["0", "1"]


def test_it_ends_when_what_a_rank_leaves_behind_has_ended(program, tmp_path):
    child = "print(subprocess.Popen(['sleep', '3'], start_new_session=True).pid)"
    job = finished(server.command(program(RANK + child)), tmp_path)
    assert not psutil.pid_exists(int(job.stdout.split()[1]))


@pytest.mark.slow
def test_a_rank_that_fails_before_the_others_join_ends_them(program, tmp_path):
    """Otherwise they would wait for it until the process group's timeout."""
    fails = "import torch.distributed as dist\nassert os.environ['RANK'] == '0'\n"
    path = program(f"{RANK}{fails}dist.init_process_group('gloo')")
    job = run(server.command(path, nprocs=2), tmp_path)
    assert job.stderr.endswith("exit codes of the ranks: [-9, 1]\n")


def test_all_are_ended_with_the_client(program, tmp_path):
    child = "subprocess.Popen([sys.executable, 'sleeps.py'], start_new_session=True)\n"
    program(SLEEPS, "sleeps.py")
    stopped = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    with Job(server.command(program(RANK + child + stopped), nprocs=2), tmp_path) as job:
        found = pids(job, 4)
    wait_until_gone(*found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_all_are_ended_with_the_tests(program, tmp_path, number):
    """The tests may have no time to clean up."""
    program(SLEEPS, "sleeps.py")
    test = f"""
from support import server
from support.jobs import finished

def test(tmp_path):
    finished(server.command({str(tmp_path / "sleeps.py")!r}, nprocs=2), {str(tmp_path)!r})
"""
    path = program(test, "test_sleeps.py")
    start = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    env = {server.VARIABLE: None, "PYTHONPATH": str(ROOT / "tests")}
    with Job(start, tmp_path, env) as job:

        def printed():
            texts = [path.read_text("utf-8") for path in tmp_path.glob(".*.stdout")]
            found = [word for text in texts for word in text.split() if word.isdigit()]
            return [int(word) for word in found] if len(found) == 2 else None

        ranks = job.wait_for(printed)
        others = [process.pid for process in job.processes()]
        job.process.send_signal(number)
        job.wait()
        wait_until_gone(*ranks, *others)


# ---------------------------------------------------------------- which tests run

TESTS = """
import pytest

@pytest.mark.weekly
@pytest.mark.parametrize("number", range(20))
def test_again(number):
    pass

@pytest.mark.slow
def test_slow():
    pass

def test_quick(repetitions):
    print("\\nrepetitions:", repetitions(20))
"""


def passed(program, folder, turn, *options):
    """Return the names of the passed tests, and the number of repetitions inside a test."""
    program(TESTS, "test_some.py")
    program(f"import conftest\n\nconftest.turn = lambda: {turn}\n", "turned.py")
    words = ["pytest", "-rA", "-p", "conftest", "-p", "turned", "-p", "no:cacheprovider"]
    env = {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("tests", ".", "slurm"))}
    job = finished(server.command("-m", *words, "test_some.py", *options), folder, env)
    (count,) = re.findall(r"^repetitions: (\d+)$", job.stdout, re.MULTILINE)
    return re.findall(r"^PASSED test_some.py::(.+)$", job.stdout, re.MULTILINE), int(count)


def test_the_turns_together_are_everything(program, tmp_path):
    everything, count = passed(program, tmp_path, 0, "--everything=all")
    assert (len(everything), count) == (22, 20)
    turns = [passed(program, tmp_path, turn, "--everything") for turn in range(4)]
    assert {5} == {count for _, count in turns}
    again = [name for names, _ in turns for name in names if name.startswith("test_again")]
    assert sorted(again) == sorted(set(everything) - {"test_slow", "test_quick"})
    for names, _ in turns:
        assert {"test_slow", "test_quick"} < set(names) < set(everything)
    without, _ = passed(program, tmp_path, 0)
    assert without == ["test_quick"]
