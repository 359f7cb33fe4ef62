"""Step 4 on nodes that are lost, and that join again."""

import contextlib
import re
import signal
import socket

import psutil
import pytest
import torch
from conftest import (
    SCRIPT,
    SMALL,
    TORCHRUN,
    Job,
    edited,
    epochs,
    finished,
    resumed,
    same_bits,
)
from observer.srun import free_port

pytestmark = pytest.mark.everything
EPOCHS = 30
ARGS = (str(EPOCHS), *SMALL)


def node(folder, port, script=SCRIPT["04"], nnodes="1:2", args=ARGS):
    """Start the agent of a node, with one worker, in a folder that all nodes share."""
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    options = [f"--nnodes={nnodes}", "--max-restarts=3", "--rdzv-conf=last_call_timeout=3"]
    return Job([TORCHRUN, *options, *where, script, *args], folder)


@contextlib.contextmanager
def two_nodes(folder):
    """Start the node that hosts the rendezvous, then another; yield once both train."""
    port = free_port()
    with node(folder, port) as host:
        host.wait_for(lambda: listening(port))
        with node(folder, port) as other:
            wait_for_epoch([host, other], 2)
            yield port, host, other


def listening(port):
    with socket.socket() as client:
        return client.connect_ex(("localhost", int(port))) == 0


def wait_for_epoch(jobs, number):
    """Wait until the node that has rank 0 prints this epoch or a later one."""
    jobs[0].wait_for(lambda: max((n for job in jobs for n in epochs(job)), default=0) >= number)


def world_size(job):
    """Return the world size of the worker of a node, or None if it has no worker now."""
    for worker in job.workers().values():
        with contextlib.suppress(psutil.Error, KeyError):  # an exiting process has no environment
            return int(worker.environ()["WORLD_SIZE"])
    return None


def cut_the_power(job):
    """Kill everything that runs on a node at once."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in job.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
    job.wait_until_gone()


def samples_at_stops(job):
    """Return the number of samples for each time the job was interrupted."""
    return [int(n.replace(",", "")) for n in re.findall(r"interrupted after ([\d,]+)", job.stdout)]


def test_a_node_is_lost_and_comes_back(tmp_path):
    folder = tmp_path / "elastic"
    folder.mkdir()
    with two_nodes(folder) as (port, host, other):
        assert world_size(host) == world_size(other) == 2
        cut_the_power(other)
        host.wait_for(lambda: world_size(host) == 1)
        host.wait_for("^resuming from ")
        run_by_two = resumed(host)[0]
        wait_for_epoch([host], run_by_two + 2)
        with node(folder, port) as again:
            for job in (host, again):
                job.wait_for(lambda job=job: world_size(job) == 2)
            for job in (host, again):
                assert job.wait().returncode == 0, job
                job.wait_until_gone()
    # After the return either node may have rank 0, which prints.
    (samples,) = samples_at_stops(host)  # told by its agent to stop, so nothing was lost
    (run_by_one,) = resumed(host)[1:] + resumed(again)
    assert 0 < run_by_two < run_by_one < EPOCHS
    assert 0 <= samples < 12_942
    printed = [number for job in (other, host, again) for number in epochs(job)]
    assert set(printed) == set(range(1, EPOCHS + 1))

    steady = tmp_path / "steady"  # the same world sizes at the same positions, without a fault
    steady.mkdir()
    two = [TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT["04"]]
    finished([*two, str(run_by_two), *SMALL], steady)
    line = "if step % 10 == 0 and self._stop_agreed():"
    there = f"if (self.epochs_run, self.samples_run) == ({run_by_one}, {samples}):"
    stops = edited(tmp_path, "04", (line, there))
    with Job([TORCHRUN, "--standalone", stops, *ARGS], steady) as job:
        assert job.wait().returncode == 1
    finished([*two, *ARGS], steady)
    assert same_bits(steady / "checkpoint.pt", folder / "checkpoint.pt")


def test_the_host_of_the_rendezvous_is_lost(tmp_path, trained):
    """The job ends on every node. Started again on any node, it resumes."""
    with two_nodes(tmp_path) as (_, host, other):
        cut_the_power(host)
        assert other.wait(120).returncode == 1
        other.wait_until_gone()
    assert "accuracy" not in host.stdout + other.stdout
    start = [TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT["04"], *ARGS]
    job = finished(start, tmp_path)
    assert same_bits(job, trained("02", *ARGS))


def test_one_node_is_told_to_stop(tmp_path, trained):
    """The other stops at the same step, and both exit with an error."""
    port = free_port()
    with (
        node(tmp_path, port, nnodes=2) as one,
        node(tmp_path, port, nnodes=2) as two,
    ):
        wait_for_epoch([one, two], 1)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait().returncode == 1
        two.process.send_signal(signal.SIGTERM)  # or it would wait for the first node to return
        assert two.wait().returncode != 0
        for job in (one, two):
            job.wait_until_gone()
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert 0 <= checkpoint["SAMPLES_RUN"] < 12_942
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    start = [TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT["04"], *ARGS]
    assert same_bits(finished(start, tmp_path), trained("02", *ARGS))
