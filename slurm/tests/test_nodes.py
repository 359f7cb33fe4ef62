"""Nodes are lost, rejoin and are told to stop. Here, a node is a torchrun, without Slurm."""

import contextlib
import re
import signal

import psutil
import pytest
from support.jobs import RESTARTS, Job, finished, free_port, kill, run
from support.positions import GATE, ON_RANK_1, SIGTERM, at, wait_at_the_gate
from support.results import epochs, printed_by, resumed, same_bits
from support.scripts import LONG, SMALL, TORCHRUN, edited, forked, on_each_rank

pytestmark = pytest.mark.slow


def test_a_node_that_falls_silent_is_an_error_and_not_a_hang(tmp_path):
    """A stopped process keeps its connections open, like a lost node."""
    short = ("timedelta(minutes=5)", "timedelta(seconds=8)")
    stops = f"{on_each_rank('os.getpid()')}os.kill(os.getpid(), signal.SIGSTOP)"
    path = edited(tmp_path, "04", short, at(0, 5, stops, when=ON_RANK_1))
    with Job(forked(path, *LONG), tmp_path) as job:
        job.wait_for(lambda: re.search("Timed out|Application timeout", job.stderr))
        kill(psutil.Process(int(printed_by(job, 1)[0])), signal.SIGCONT)
        assert job.wait().returncode == 1


def start_node(folder, port, script, host=False):
    """Start the agent of a node with one rank, which waits a few seconds for a second node."""
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--node-rank=0"]  # ignored
    where += [f"--rdzv-conf=is_host={int(host)},last_call_timeout=10"]
    words = [TORCHRUN, "--nnodes=1:2", "--max-restarts=3", *where, script, *LONG]
    return Job(words, folder, RESTARTS)


@contextlib.contextmanager
def two_nodes(folder, script):
    """Start the rendezvous host and another node; yield (port, host, other, gate)."""
    port = free_port()
    with (
        start_node(folder, port, script, host=True) as host,
        start_node(folder, port, script) as other,
    ):
        gate = wait_at_the_gate(host)
        yield port, host, other, gate


def cut_the_power(job):
    """Kill everything on a node at once."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in job.processes():
            kill(process, number)
    job.wait_until_gone()


def test_a_node_is_lost_and_comes_back_and_no_step_is_lost(tmp_path):
    """The other goes on alone from the last checkpoint, until its agent hears of the new node."""
    folder = tmp_path / "elastic"
    folder.mkdir()
    until_told = "while not stop_signals:\n    time.sleep(0.01)"
    alone = "dist.get_world_size() == 1"
    waits = at(1, 15, GATE, when=f"not {alone}"), at(2, 15, until_told, when=alone)
    script = edited(folder, "04", *waits)
    with two_nodes(folder, script) as (port, host, other, gate):
        cut_the_power(other)
        gate.touch()
        host.wait_for(lambda: 2 in epochs(host))
        with start_node(folder, port, script) as again:
            codes = [job.wait().wait_until_gone().returncode for job in (host, again)]
        assert codes == [0, 0], (host, again)
    # After the node's return, rank 0, which prints, may be on either node.
    assert resumed(host)[0] == 1
    assert "interrupted after 1,280 samples" in host.stdout  # 20 steps of one
    assert resumed(host)[1:] + resumed(again) == [2]
    printed = [number for job in (other, host, again) for number in epochs(job)]
    assert sorted(printed) == [1, 2, 3, 4]

    steady = tmp_path / "steady"  # the same world sizes at the same positions, without a fault
    steady.mkdir()
    stops = edited(tmp_path, "04", at(2, 15, SIGTERM, when=alone))
    finished(forked(stops, "1", *SMALL), steady)
    assert run(forked(stops, *LONG, nprocs=1), steady).returncode == 1
    finished(forked(stops, *LONG), steady)
    assert same_bits(steady / "checkpoint.pt", folder / "checkpoint.pt")


def test_the_host_of_the_rendezvous_is_lost(tmp_path, trained):
    """The job fails on every node. Started again anywhere, it resumes."""
    with two_nodes(tmp_path, edited(tmp_path, "04", at(2, 15, GATE))) as (_, host, other, gate):
        cut_the_power(host)
        gate.touch()
        assert other.wait().wait_until_gone().returncode == 1, other
    job = finished(forked("04", *LONG), tmp_path)
    assert resumed(job) == [2]
    assert same_bits(job, trained("03", *LONG))
