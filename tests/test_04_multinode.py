"""Step 4 on several nodes: agents of their own, on one machine."""

import contextlib
import re
import signal
import socket
import sys
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from support.jobs import RESTARTS, Job, finished, free_port, kill, run
from support.results import epochs, error_lines, resumed, same_bits
from support.scripts import LONG, SCRIPT, SMALL, TORCHRUN, command, edited, load


@contextlib.contextmanager
def nodes(tmp_path, count, nprocs, args, static=False, path=SCRIPT["04"]):
    """Start one agent per node, each in its own folder. They share only the checkpoint."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        jobs = []
        for node in range(count):
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            words = [TORCHRUN, f"--nnodes={count}", f"--nproc-per-node={nprocs}"]
            if static:
                words += [f"--node-rank={node}", "--master-addr=localhost"]
                words += [f"--master-port={port}", "--max-restarts=0"]
            else:
                words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
                words += ["--node-rank=0"]  # ignored here, or both would be the first node
                words += ["--max-restarts=3"]
            words += [path, *args, f"--checkpoint-path={tmp_path / 'checkpoint.pt'}"]
            jobs.append(stack.enter_context(Job(words, folder, None if static else RESTARTS)))
        yield jobs


def seen_by_all(jobs):
    """Return the output of the node that has global rank 0. The others must print nothing."""
    for job in jobs:
        assert job.wait(180).returncode == 0, job
        job.wait_until_gone()
    outputs = [job.stdout for job in jobs if job.stdout]
    assert len(outputs) == 1, outputs
    return outputs[0]


def bits_equal(tmp_path, other):
    return same_bits(tmp_path / "checkpoint.pt", other)


def test_two_nodes_of_two_are_one_of_four(trained, tmp_path):
    with nodes(tmp_path, 2, 2, LONG) as jobs:
        output = seen_by_all(jobs)
    assert output.count("epoch ") == 4
    assert output.count("accuracy") == 1
    assert bits_equal(tmp_path, trained("03", *LONG, nprocs=4))
    left = sorted(path.name for path in tmp_path.rglob("[!.]*"))
    assert left == ["checkpoint.pt", "node0", "node1"]


@pytest.mark.everything
def test_static_rendezvous(trained, tmp_path):
    with nodes(tmp_path, 2, 1, LONG, static=True) as jobs:
        seen_by_all(jobs)
    assert bits_equal(tmp_path, trained("03", *LONG))


@pytest.mark.everything
def test_any_launcher_that_sets_the_ranks(trained, tmp_path):
    """The way srun alone would start it, without torchrun."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    start = [sys.executable, SCRIPT["04"], *LONG]
    with (
        Job(start, tmp_path, {"RANK": "0", "LOCAL_RANK": "0", **common}) as zero,
        Job(start, tmp_path, {"RANK": "1", "LOCAL_RANK": "0", **common}) as one,
    ):
        seen_by_all([zero, one])
    assert bits_equal(tmp_path, trained("03", *LONG))


@pytest.mark.everything
def test_kill_9_on_one_of_two_nodes(trained, tmp_path):
    with nodes(tmp_path, 2, 2, LONG) as jobs:
        host = next(job for job in jobs if 0 in job.wait_for(job.workers))
        other = jobs[1 - jobs.index(host)]
        other.wait_for(lambda: len(other.workers()) == 2)
        worker = other.workers()[max(other.workers())]
        host.wait_for("^epoch 1 ")
        kill(worker)
        output = seen_by_all(jobs)
    before, after = re.split(r"^resuming from .*\n", output, flags=re.MULTILINE)
    assert "epoch 4 " not in before
    assert "epoch 4 " in after
    assert bits_equal(tmp_path, trained("03", *LONG, nprocs=4))


def test_local_rank_picks_the_gpu_before_the_group_is_joined(monkeypatch):
    """Without a GPU, check the calls."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kw: calls.append((*args, kw)))
    monkeypatch.setenv("LOCAL_RANK", "3")
    load("04").ddp_setup()
    device, (backend, options) = calls
    assert (device, backend) == (3, "cpu:gloo,cuda:nccl")
    assert timedelta(seconds=10) < options["timeout"] <= timedelta(minutes=10)


@pytest.mark.everything
def test_a_node_that_falls_silent_is_an_error_and_not_a_hang(tmp_path):
    """A stopped process keeps its connections open, as a lost node does."""
    path = edited(tmp_path, "04", ("timedelta(minutes=5)", "timedelta(seconds=8)"))
    with Job(command(path, "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        job.workers()[1].send_signal(signal.SIGSTOP)
        job.wait_for(lambda: re.search("Timed out|Application timeout", job.stderr))
        kill(job.workers()[1], signal.SIGCONT)
        assert job.wait().returncode == 1
        job.wait_until_gone()


def test_without_torchrun(tmp_path):
    job = run([sys.executable, SCRIPT["04"]], tmp_path)
    assert job.returncode == 1
    (line,) = error_lines(job)
    assert "environment variable RANK expected" in line
    assert job.stdout == ""


# ---------------------------------------------------------------- nodes are lost, and join again

EPOCHS = 30
ARGS = (str(EPOCHS), *SMALL)


def start_node(folder, port, script=SCRIPT["04"], nnodes="1:2", args=ARGS):
    """Start the agent of a node, with one worker, in a folder that all nodes share."""
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    options = [f"--nnodes={nnodes}", "--max-restarts=3", "--rdzv-conf=last_call_timeout=3"]
    return Job([TORCHRUN, *options, *where, script, *args], folder, RESTARTS)


@contextlib.contextmanager
def two_nodes(folder):
    """Start the node that hosts the rendezvous, then another; yield once both train."""
    port = free_port()
    with start_node(folder, port) as host:
        host.wait_for(lambda: listening(port))
        with start_node(folder, port) as other:
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


@pytest.mark.everything
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
        with start_node(folder, port) as again:
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


@pytest.mark.everything
def test_the_host_of_the_rendezvous_is_lost(tmp_path, trained):
    """The job ends on every node. Started again on any node, it resumes."""
    with two_nodes(tmp_path) as (_, host, other):
        cut_the_power(host)
        assert other.wait(120).returncode == 1
        other.wait_until_gone()
    assert "accuracy" not in host.stdout + other.stdout
    start = [TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT["04"], *ARGS]
    job = finished(start, tmp_path)
    assert same_bits(job, trained("03", *ARGS))


@pytest.mark.everything
def test_one_node_is_told_to_stop(tmp_path, trained):
    """The other stops at the same step, and both exit with an error."""
    port = free_port()
    with (
        start_node(tmp_path, port, nnodes=2) as one,
        start_node(tmp_path, port, nnodes=2) as two,
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
    assert same_bits(finished(start, tmp_path), trained("03", *ARGS))
