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
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support import gpus

# Only for runs with --max-restarts, because torchrun then chooses a port long before it is used.
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Result:
    """The exit code and output of a finished command."""

    command: list
    cwd: Path
    returncode: int
    stdout: str
    stderr: str

    def __repr__(self):
        return shown(self, self.returncode)


class Job:
    """A running command and its descendants; leaving the `with` block kills those still alive."""

    def __init__(self, command, cwd, env=None):
        self.mark = uuid.uuid4().hex  # every descendant inherits it, even an orphan
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

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes():
            kill(process)
        self.process.wait()

    @property
    def stdout(self):
        """Return the output so far, without gloo's messages, which PyTorch 2.8 prints in pieces."""
        text = self.paths[0].read_text(encoding="utf-8")
        return re.sub(r"^(?:.*(?:\[Gloo\]|peer ranks).*|\d+)\n", "", text, flags=re.MULTILINE)

    @property
    def stderr(self):
        return self.paths[1].read_text(encoding="utf-8")

    def processes(self):
        """Return the processes of this job that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                living = process.status() != psutil.STATUS_ZOMBIE
                if living and process.environ().get("DDP_LADDER_JOB") == self.mark:
                    found.append(process)
        return found

    def workers(self):
        """Return the training processes that torchrun started: {rank: process}."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "RANK" in (env := process.environ()):
                    found[int(env["RANK"])] = process
        return found

    def wait(self, timeout=300):
        """Wait for the command to exit; after the timeout, fail and show its output."""
        try:
            self.returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s: {self}")
        return self

    def wait_for(self, what, timeout=300):
        """Wait until `what()` is true or, for a pattern, stdout matches it; return the result."""
        ready = what if callable(what) else lambda: re.search(what, self.stdout, re.MULTILINE)
        end = time.monotonic() + timeout
        while not (result := ready()):
            if self.process.poll() is not None or time.monotonic() > end:
                if result := ready():
                    break
                pytest.fail(f"{what!r} did not happen: {self}")
            time.sleep(0.02)
        return result

    def wait_until_gone(self, timeout=120):
        """Wait until no process of this job is left."""
        end = time.monotonic() + timeout
        while left := self.processes():
            if time.monotonic() > end:
                pytest.fail(f"{left} left behind by {self}")
            time.sleep(0.05)

    def result(self, timeout=300):
        """Wait until the command and all its descendants have ended; return the Result."""
        self.wait(timeout).wait_until_gone()
        return Result(self.command, self.cwd, self.returncode, self.stdout, self.stderr)

    def __repr__(self):
        return shown(self, self.process.poll())


def shown(job, code):
    return f"{' '.join(job.command)}\nexit {code}\n{job.stdout}\n---- stderr\n{job.stderr}"


def environment(**changes):
    """Return this process's environment; variables that could affect a test are set or removed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **gpus.environment(), **changes}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *RESTARTS):
        env[name] = changes.get(name)
    return {name: value for name, value in env.items() if value is not None}


def run(command, cwd, env=None, timeout=300):
    """Run a command, check that it leaves no process behind, and return the Result."""
    with Job(command, cwd, env) as job:
        return job.result(timeout)


def finished(command, cwd, env=None, timeout=300):
    """Run a command as `run` does, and check that it succeeds."""
    result = run(command, cwd, env, timeout)
    assert result.returncode == 0, result
    return result


def kill(process, number=signal.SIGKILL):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def free_port():
    """Return a free port below the range from which the system assigns ports."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", port := random.randint(20_000, 32_000)))
            return str(port)
