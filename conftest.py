"""What the tests of all rooms share: which of them run, and the fixtures that train a step."""

import os
import signal
import tempfile

import pytest
import torch
import torch.distributed as dist
from support import gpus, server
from support.jobs import RESTARTS, Job, finished
from support.once import FOLDER, once
from support.positions import GATE, KILLED, ON_RANK_1, at, wait_at_the_gate
from support.scripts import LONG, SCRIPT, command, edited, forked

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


@pytest.fixture(scope="session")
def disturbed():
    """Run a step under torchrun; kill a rank in epoch 2, send SIGTERM in epoch 3, start it again.

    Return the Results of both runs, and the checkpoint that SIGTERM left.
    """

    def disturb(step):
        def make(cwd):
            disturbances = at(1, 20, KILLED, ON_RANK_1), at(2, 15, GATE)
            script = edited(cwd, step, *disturbances)
            start = command(script, *LONG, torchrun=("--max-restarts=1",))
            with Job(start, cwd, RESTARTS) as job:
                wait_at_the_gate(job)
                job.process.send_signal(signal.SIGTERM)
                first = job.result()
            left = {path.name for path in cwd.glob("checkpoint.pt*")}
            assert "checkpoint.pt.interrupted" in left, first
            saved = torch.load(cwd / "checkpoint.pt", weights_only=True)
            return first, saved, finished(forked(step, *LONG), cwd)

        return once(("disturbed", SCRIPT[step].read_text(encoding="utf-8")), make)

    return disturb


@pytest.fixture
def process_group():
    """Join a process group of which this process is the only member."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
