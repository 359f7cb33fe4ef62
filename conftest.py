"""What the tests of all rooms share: which of them run, and the fixtures that train a step."""

import os
import signal
import tempfile
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
from support import gpus, server
from support.jobs import finished
from support.once import FOLDER, once
from support.scripts import SCRIPT, command, edited, forked

# ---------------------------------------------------------------- what runs


def pytest_addoption(parser):
    parser.addoption("--gpus", action="store_true", help="run what is marked gpu, on GPUs")


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    os.environ.pop("PYTHONUNBUFFERED", None)  # would divide the lines that ranks print
    if config.option.gpus:
        config.option.markexpr = "gpu"
        os.environ.setdefault(gpus.VARIABLE, str(torch.cuda.device_count()))
        if not gpus.count():
            raise pytest.UsageError("no GPU here, or a PyTorch without CUDA")
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="trained-")
        config.add_cleanup(folder.cleanup)
        os.chmod(folder.name, 0o1777)  # as /tmp is
        os.environ[FOLDER] = os.environ["TMPDIR"] = folder.name  # torchrun leaves a folder there
    if getattr(config.option, "numprocesses", None):
        server.start()  # one for all workers of pytest-xdist, which inherit its address


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Turn a skip into a failure where CI has installed everything but GPUs."""
    report = yield
    unexpected = report.skipped and "GPU" not in str(report.longrepr)
    if unexpected and not hasattr(report, "wasxfail") and "CI" in os.environ:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter):
    """Print a line for each file: with `-n`, the workers' lines are those of several files."""
    files = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.getreports(outcome):
            files[report.nodeid.partition("::")[0]][outcome] += 1
    terminalreporter.section("the outcome of each file")
    for path, outcomes in sorted(files.items()):
        counts = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        terminalreporter.write_line(f"{path:42} {counts}")


# ---------------------------------------------------------------- training


@pytest.fixture(scope="session")
def launched():
    """Run a step to completion with its own launcher, once for all tests."""

    def train(step, *args, nprocs=2):
        text = SCRIPT[step].read_text(encoding="utf-8")
        start = command(step, *args, nprocs=nprocs)
        return once(("launched", text, args, nprocs), lambda cwd: finished(start, cwd))

    return train


@pytest.fixture(scope="session")
def trained_with():
    """Run an edited step to completion on forked ranks, once for all tests."""

    def train(step, changes, args, nprocs=2):
        def make(cwd):
            (cwd / ".script").mkdir()
            script = edited(cwd / ".script", step, *changes)
            return finished(forked(script, *args, nprocs=nprocs), cwd)

        text = SCRIPT[step].read_text(encoding="utf-8")
        return once(("forked", text, changes, args, nprocs), make)

    return train


@pytest.fixture(scope="session")
def trained(trained_with):
    """Run a step to completion on forked ranks, once for all tests."""
    return lambda step, *args, **options: trained_with(step, (), args, **options)


@pytest.fixture
def process_group():
    """Join a process group of which this process is the only member."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
