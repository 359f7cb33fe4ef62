"""Step 4 on several nodes: agents of their own, on one machine."""

import contextlib
import re
import signal
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import (
    LONG,
    SCRIPT,
    SMALL,
    TORCHRUN,
    Job,
    command,
    edited,
    error_lines,
    kill,
    load,
    run,
    same_bits,
)
from observer.srun import free_port


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
            jobs.append(stack.enter_context(Job(words, folder)))
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
    assert bits_equal(tmp_path, trained("02", *LONG, nprocs=4))
    left = sorted(path.name for path in tmp_path.rglob("[!.]*"))
    assert left == ["checkpoint.pt", "node0", "node1"]


@pytest.mark.everything
def test_static_rendezvous(trained, tmp_path):
    with nodes(tmp_path, 2, 1, LONG, static=True) as jobs:
        seen_by_all(jobs)
    assert bits_equal(tmp_path, trained("02", *LONG))


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
    assert bits_equal(tmp_path, trained("02", *LONG))


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
    assert bits_equal(tmp_path, trained("02", *LONG, nprocs=4))


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
