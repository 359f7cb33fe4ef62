"""Runs commands as real processes, and leaves none behind."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import psutil
from support import gpus

# Environment variables for runs with --max-restarts only: they make torchrun choose the ranks' port
# long before rank 0 uses it, so another test could take the port.
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Job(contextlib.AbstractContextManager):
    """A command that is running or has ended, and what it printed.

    The end of the `with` block kills all processes of the command that are still running.
    """

    returncode = None

    def __init__(self, command, cwd, env=None):
        self.mark = uuid.uuid4().hex  # every process that the command starts inherits it
        self.command, self.cwd = [str(word) for word in command], Path(cwd)
        self.paths = [self.cwd / f".{self.mark}.{name}" for name in ("stdout", "stderr")]
        # Several ranks write to one file, and only appending keeps their lines intact.
        with self.paths[0].open("ab") as out, self.paths[1].open("ab") as err:
            self.process = subprocess.Popen(
                self.command,
                cwd=cwd,
                env=environment(DDP_LADDER_JOB=self.mark, **(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __exit__(self, *error):
        for process in self.processes():
            kill(process)
        self.process.wait()

    def __getstate__(self):
        return vars(self) | {"process": None}  # a running process cannot be pickled

    def __repr__(self):
        words = " ".join(self.command)
        return f"{words}\nexit code {self.returncode}\n{self.stdout}\n---- stderr\n{self.stderr}"

    @property
    def stdout(self):
        """Return the output so far, without gloo's messages, which PyTorch 2.8 prints in pieces."""
        text = self.paths[0].read_text(encoding="utf-8")
        return re.sub(r"^(?:.*(?:\[Gloo\]|peer ranks).*|\d+)\n", "", text, flags=re.MULTILINE)

    @property
    def stderr(self):
        return self.paths[1].read_text(encoding="utf-8")

    def wait(self, timeout=300):
        """Wait until the command has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.returncode = self.process.wait(timeout)
        assert self.returncode is not None, f"it did not end within {timeout} s: {self}"
        return self

    def wait_for(self, what, timeout=300):
        """Wait until `what()` is true or stdout matches the pattern `what`; return the result."""
        ready = what if callable(what) else lambda: re.search(what, self.stdout, re.MULTILINE)
        end = time.monotonic() + timeout
        while True:
            too_late = self.process.poll() is not None or time.monotonic() > end
            if result := ready():
                return result
            assert not too_late, f"{what!r} did not happen: {self}"
            time.sleep(0.02)

    def wait_until_gone(self, timeout=120):
        """Wait until no process of this job is left."""
        end = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < end, f"{left} left behind by {self}"
            time.sleep(0.05)
        return self

    def processes(self):
        """Return the processes of this job that are alive."""
        every = psutil.process_iter(["environ"])  # None for a process that has ended
        return [each for each in every if self.mark in (each.info["environ"] or {}).values()]

    def workers(self):
        """Return the training processes that torchrun started: {rank: process}."""
        workers = {process.info["environ"].get("RANK"): process for process in self.processes()}
        return {int(rank): process for rank, process in workers.items() if rank}


def environment(**changes):
    """Return this process's environment; variables that could affect a test are set or removed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **gpus.environment(), **changes}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *RESTARTS):
        env[name] = changes.get(name)
    return {name: value for name, value in env.items() if value is not None}


def run(command, cwd, env=None, timeout=300):
    """Run a command, check that it leaves no process behind, and return the Job."""
    with Job(command, cwd, env) as job:
        return job.wait(timeout).wait_until_gone()


def finished(command, cwd, env=None, timeout=300):
    """Run a command as `run` does, and check that it succeeds."""
    job = run(command, cwd, env, timeout)
    assert job.returncode == 0, job
    return job


def kill(process, number=signal.SIGKILL):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def free_port():
    """Return a free port below the range from which the system assigns ports."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", port := random.randint(20_000, 32_000)))
            return str(port)
