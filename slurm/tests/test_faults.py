"""A fault on one rank ends all ranks, with a nonzero exit code and the cause on stderr."""

import os
import re
import signal
import socket
import socketserver
import subprocess
from threading import Thread

import psutil
import pytest
import torch
from bad_data import bad_data
from support.jobs import Job, finished, kill, run
from support.positions import GATE, KILLED, ON_RANK_1, at, open_the_gate, wait_at_the_gate
from support.results import accuracy, epochs, resumed, same_bits, weights
from support.scripts import LONG, SCRIPT, SMALL, TORCHRUN, command, edited, forked

SLOW = pytest.mark.slow
REPETITION = pytest.mark.weekly("the same fault on another step")
NOBODY = "192.0.2.1"  # reserved for documentation by RFC 5737, so nobody answers

# ---------------------------------------------------------------- one rank fails

BAD_SAMPLE = bad_data('if index == 1234: raise ValueError("the first cause")')  # of one rank


@pytest.mark.parametrize("step", [pytest.param("02", marks=SLOW), "04"])
def test_an_exception_on_one_rank(tmp_path, step):
    job = run(command(edited(tmp_path, step, *BAD_SAMPLE), "4", *SMALL), tmp_path)
    assert job.returncode != 0
    assert epochs(job) == []
    if step == "02":  # mp.spawn shows the first rank that it sees end, in rare cases another one
        assert re.search("ValueError: the first cause|Connection .* by peer", job.stderr), job
    else:
        assert 'raise ValueError("the first cause")' in job.stderr  # the whole traceback
        report = job.stderr.split(" FAILED\n")[1]  # the first, unless others failed that second
        assert "ValueError: the first cause" in report, job


def test_a_killed_rank_is_named(tmp_path):
    """torchrun sends SIGTERM to the others. 04 handles it, but its next collective fails."""
    script = edited(tmp_path, "04", at(0, 15, KILLED, ON_RANK_1))
    job = run(command(script, *LONG), tmp_path)
    assert job.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in job.stderr
    assert "forcefully exiting via" not in job.stderr  # the others had ended by then
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()


@SLOW
def test_workers_of_a_dead_agent_train_on(trained, tmp_path):
    """Nothing stops the ranks, and nothing restarts them if they fail."""
    with Job(command(edited(tmp_path, "04", at(0, 15, GATE)), "1", *SMALL), tmp_path) as job:
        wait_at_the_gate(job)
        kill(job.process)
        job.wait()
        open_the_gate(job)
        job.wait_until_gone()
    assert epochs(job) == [1]
    assert accuracy(job)
    assert same_bits(job, trained("03", "1", *SMALL))


# ---------------------------------------------------------------- the rendezvous cannot be reached


def seek(tmp_path, endpoint):
    """Check that torchrun gives up after a few times read_timeout (60 s by default)."""
    where = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    start = [TORCHRUN, *where, "--rdzv-conf=read_timeout=2", SCRIPT["04"]]
    job = run(start, tmp_path, timeout=120)
    assert job.returncode == 1
    assert "RendezvousConnectionError" in job.stderr
    assert not list(tmp_path.glob("[!.]*"))


@pytest.mark.parametrize("host", ["no-such-host.invalid", pytest.param(NOBODY, marks=REPETITION)])
def test_a_rendezvous_host_that_cannot_be_reached(tmp_path, host):
    seek(tmp_path, f"{host}:29400")


class HangUp(socketserver.BaseRequestHandler):
    """Close each connection at once."""


@SLOW
def test_a_rendezvous_port_that_another_program_has(tmp_path):
    with socketserver.ThreadingTCPServer(("localhost", 0), HangUp) as server:
        Thread(target=server.serve_forever).start()
        seek(tmp_path, f"localhost:{server.server_address[1]}")
        server.shutdown()


@SLOW
def test_a_rendezvous_port_whose_owner_never_answers(tmp_path):
    """PyTorch waits for ever. If this test fails, correct the fault table."""
    with socket.create_server(("localhost", 0)) as deaf:
        endpoint = f"--rdzv-endpoint=localhost:{deaf.getsockname()[1]}"
        options = ["--nnodes=2", "--rdzv-backend=c10d", endpoint, "--rdzv-conf=read_timeout=2"]
        with Job([TORCHRUN, *options, SCRIPT["04"]], tmp_path) as job:
            deaf.settimeout(60)
            connection, _ = deaf.accept()
            with connection, pytest.raises(subprocess.TimeoutExpired):
                job.process.wait(15)


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=REPETITION) for n in ("01", "02")), "04"])
def test_ctrl_c(tmp_path, step):
    with Job(command(step, "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 2 ")
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        assert job.wait().returncode != 0
        job.wait_until_gone()
    assert weights(job)
    assert "accuracy" not in job.stdout


@SLOW
@pytest.mark.parametrize("step", ["01", *(pytest.param(n, marks=REPETITION) for n in ("02", "03"))])
def test_sigterm_ends_steps_1_to_3_at_once(tmp_path, step):
    """All processes get it, as under Slurm; the next run begins after the last save."""
    with Job(command(step, "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 2 ")
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.wait().returncode != 0
        job.wait_until_gone()
    assert "accuracy" not in job.stdout
    assert not list(tmp_path.glob("*.interrupted"))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["EPOCHS_RUN"]
    again = finished(command(step, str(saved + 1), *SMALL), tmp_path)
    assert resumed(again) == [saved]
    assert epochs(again) == [saved + 1]


# ---------------------------------------------------------------- loader workers, a full disk

WORKERS = ("=outlive_sigterm", "=outlive_sigterm, num_workers=2, persistent_workers=True")


@SLOW
def test_kill_9_leaves_no_loader_worker(tmp_path):
    """Each worker notices within seconds that its parent is gone."""
    script = edited(tmp_path, "04", WORKERS, at(1, 25, GATE))
    with Job(command(script, *LONG), tmp_path) as job:
        wait_at_the_gate(job)
        found = job.processes()
        ranks = job.process, *psutil.Process(job.process.pid).children()
        for process in ranks:
            process.kill()
        job.wait()
        job.wait_until_gone()
    assert len(found) - len(ranks) >= 4


@SLOW
def test_an_exception_in_a_loader_worker(tmp_path):
    """Python sends SIGTERM to the workers, too, and waits for them: they must end at last."""
    soon = ("signal.alarm(300)", "signal.alarm(3)")
    job = run(forked(edited(tmp_path, "04", WORKERS, soon, *BAD_SAMPLE), "1"), tmp_path)
    assert job.returncode == 1
    assert "ValueError: the first cause" in job.stderr


SEED = "    torch.manual_seed(args.seed)\n"
FULL = "    __import__('resource').setrlimit(1, (65536, 65536))  # RLIMIT_FSIZE, in bytes\n"
WIDE = ("--batch-size=64", "--width=16")  # its checkpoint is larger than its output


@SLOW
def test_a_full_disk(trained, tmp_path):
    finished(forked("04", "1", *WIDE), tmp_path)
    saved = (tmp_path / "checkpoint.pt").read_bytes()
    assert len(saved) > 100_000
    job = run(forked(edited(tmp_path, "04", (SEED, FULL + SEED)), "3", *WIDE), tmp_path)
    assert not re.search(r"exit codes of the ranks: .*\b0\b", job.stderr), job
    assert "in _save_checkpoint" in job.stderr
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved
    job = finished(forked("04", "3", *WIDE), tmp_path)
    assert epochs(job) == [2, 3]
    assert same_bits(job, trained("04", "3", *WIDE))
