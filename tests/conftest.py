"""Start the real scripts as real processes, the way the README does, and clean up after them."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("0[1-9]_*.py"))
SCRIPT = {path.name[:2]: path for path in SCRIPTS}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SMALL = ("--batch-size=64", "--width=4")  # a network that trains in a blink, for what is not speed
LONG = ("4", *SMALL)  # long enough to be interrupted
EXPECTED_SKIPS = ()  # test ids that may be skipped even with --everything


# ---------------------------------------------------------------- pytest: quick, and --everything


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="also the tests that take minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "everything: takes minutes, runs with --everything only")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--everything"):
        for item in items:
            if item.get_closest_marker("everything"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: run pytest --everything"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """With --everything, nothing is skipped in silence."""
    report = yield
    allowed = item.nodeid in EXPECTED_SKIPS or not item.config.getoption("--everything")
    if report.skipped and not hasattr(report, "wasxfail") and not allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped, though --everything was asked for: {report.longrepr}"
    return report


# ---------------------------------------------------------------- starting scripts


class Job:
    """A running script with all its processes; as a context, it leaves none of them behind."""

    def __init__(self, command, cwd, env=None):
        self.mark = uuid.uuid4().hex  # every descendant inherits it, orphans too
        self.command, self.cwd = [str(word) for word in command], Path(cwd)
        self.paths = [self.cwd / f".{self.mark}.{name}" for name in ("stdout", "stderr")]
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(path.open("wb")) for path in self.paths)
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
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    @property
    def stdout(self):
        return self.paths[0].read_text(encoding="utf-8")

    @property
    def stderr(self):
        return self.paths[1].read_text(encoding="utf-8")

    def processes(self):
        """Return every living process of this job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                living = process.status() != psutil.STATUS_ZOMBIE
                if living and process.environ().get("DDP_LADDER_JOB") == self.mark:
                    found.append(process)
        return found

    def workers(self):
        """Return the processes that torchrun started, by global rank."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "RANK" in (env := process.environ()):
                    found[int(env["RANK"])] = process
        return found

    def wait(self, timeout=120):
        """Wait for the end; fail, with all that was printed, if it does not come in time."""
        try:
            self.returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s: {self}")
        return self

    def wait_for(self, what, timeout=120):
        """Wait until `what()` is true, or until the output matches the pattern `what`."""
        ready = what if callable(what) else lambda: re.search(what, self.stdout, re.MULTILINE)
        end = time.monotonic() + timeout
        while not (result := ready()):
            if self.process.poll() is not None or time.monotonic() > end:
                if result := ready():
                    break
                pytest.fail(f"waited for {what!r} in vain: {self}")
            time.sleep(0.005)
        return result

    def wait_until_gone(self, timeout=60):
        """Wait until not one process of this job is left."""
        end = time.monotonic() + timeout
        while left := self.processes():
            if time.monotonic() > end:
                pytest.fail(f"{left} left behind by {self}")
            time.sleep(0.05)

    def __repr__(self):
        words = " ".join(self.command)
        return f"{words}\nexit {self.process.poll()}\n{self.stdout}\n---- stderr\n{self.stderr}"


def environment(**changes):
    """Return this process's environment, made equal on every machine; None removes a variable."""
    same = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env = {**os.environ, **same, "CUDA_VISIBLE_DEVICES": "", **changes}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.setdefault(name, None)
        env[name] = changes.get(name)
    return {name: value for name, value in env.items() if value is not None}


def command(step, *args, nprocs=2, torchrun=()):
    """Return the command that starts a step, or a changed copy of it, with so many processes."""
    path = SCRIPT.get(step, step)
    if path.name.startswith("01"):
        return [sys.executable, path, *args]
    if path.name.startswith("02"):
        return [sys.executable, path, f"--nprocs={nprocs}", *args]
    return [TORCHRUN, "--standalone", f"--nproc-per-node={nprocs}", *torchrun, path, *args]


def run(command, cwd, env=None, timeout=120):
    """Run a command to its end, and see that it leaves no process behind."""
    with Job(command, cwd, env) as job:
        job.wait(timeout).wait_until_gone()
    return job


def finished(command, cwd, env=None, timeout=120):
    """Run a command that must succeed."""
    job = run(command, cwd, env, timeout)
    assert job.returncode == 0, job
    return job


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Run a step to its end, once per session for the same arguments."""
    done = {}

    def train(step, *args, nprocs=2, torchrun=()):
        key = step, args, nprocs, torchrun
        if key not in done:
            cwd = tmp_path_factory.mktemp(f"step{step}")
            done[key] = finished(command(step, *args, nprocs=nprocs, torchrun=torchrun), cwd)
        return done[key]

    return train


def edited(tmp_path, step, *changes):
    """Write a copy of a step with some of its text replaced: to break it, or to look inside."""
    text = SCRIPT[step].read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {SCRIPT[step].name}"
        text = text.replace(old, new)
    path = tmp_path / SCRIPT[step].name
    path.write_text(text, encoding="utf-8")
    return path


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def kill(process, number=signal.SIGKILL):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


# ---------------------------------------------------------------- looking at results


def weights(job_or_path):
    """Return the trained weights, by name, from any step's checkpoint."""
    path = job_or_path.cwd / "checkpoint.pt" if isinstance(job_or_path, Job) else job_or_path
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint.get("MODEL_STATE", checkpoint)


def same_bits(a, b):
    """Say whether two runs ended with the same weights, bit for bit."""
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def accuracy(job):
    """Return the numbers of the last line: percent, correct, total."""
    match = re.fullmatch(r"accuracy ([\d.]+)% \((\d+)/(\d+)\)", job.stdout.splitlines()[-1])
    assert match, job
    return float(match[1]), int(match[2]), int(match[3])


def epochs(job):
    """Return the numbers of the epochs whose lines were printed."""
    return [int(number) for number in re.findall(r"^epoch (\d+) ", job.stdout, re.MULTILINE)]


def error_lines(job):
    """Return the lines by which the script itself refused its input."""
    return [line for line in job.stderr.splitlines() if re.match(r"0\d_\w+\.py: error: ", line)]


# ---------------------------------------------------------------- scripts as modules


def load(step):
    """Import a step's script."""
    spec = importlib.util.spec_from_file_location(f"step{step}", SCRIPT[step])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(path, **changes):
    """Return what parse_args returns for a small network."""
    values = {"total_epochs": 1, "save_every": 1, "batch_size": 64, "lr": 1e-3, "width": 1}
    return SimpleNamespace(**{**values, "seed": 0, "checkpoint_path": str(path), **changes})


@pytest.fixture
def process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
