"""The options of the test suite, and the fixtures that several files use."""

import os
import signal
import subprocess
import tempfile
import zlib

import pytest
import torch.distributed as dist
from support.browser import browser, visit  # noqa: F401  # fixtures
from support.checker import own_folder  # noqa: F401  # a fixture
from support.generator import copy  # noqa: F401  # a fixture
from support.jobs import finished
from support.machines import holder, machines  # noqa: F401  # fixtures
from support.once import FOLDER, once
from support.scripts import ROOT, SCRIPT, SMALL, command, edited, forked, patched
from support.slurm import clone, cluster, gated, submit  # noqa: F401  # fixtures

# Parts of the ids of tests that --everything may skip: they need GPUs, or cgroups v1.
EXPECTED_SKIPS = ("[nccl-", "test_out_of_memory")
TURNS = 4  # runs of --everything until each repetition has had its turn
COLLECTED = pytest.StashKey()  # the ids of all tests, those of later turns too

# ---------------------------------------------------------------- what runs


def pytest_addoption(parser):
    parser.addoption(
        "--everything",
        nargs="?",
        const="turn",
        choices=["turn", "all"],
        help="also run the slow tests, and a quarter of the repetitions, chosen by the commit; "
        "`--everything=all` runs all of them",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "everything: slow, runs only with --everything")
    config.addinivalue_line("markers", "repetition: the same, but only in every fourth run")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    os.environ.pop("PYTHONUNBUFFERED", None)  # would divide the lines that ranks print
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="trained-")
        config.add_cleanup(folder.cleanup)
        os.chmod(folder.name, 0o1777)  # as /tmp is
        os.environ[FOLDER] = os.environ["TMPDIR"] = folder.name  # torchrun leaves a folder there


def turn():
    """Return the number of this commit's turn, from 0."""
    words = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(found or "0", 16) % TURNS


def pytest_report_header(config):
    if config.getoption("--everything") == "turn":
        return f"repetitions: turn {turn() + 1} of {TURNS}; --everything=all runs all of them"
    return None


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("--everything")
    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        slow = item.get_closest_marker("everything") or item.get_closest_marker("repetition")
        if slow and not chosen:
            item.add_marker(pytest.mark.skip(reason="takes minutes: run pytest --everything"))
    if chosen == "turn" and not config.getoption("keyword"):  # -k runs what it names
        now = turn()
        later = [
            item
            for item in items
            if item.get_closest_marker("repetition")
            and zlib.crc32(item.name.encode()) % TURNS != now
        ]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


@pytest.fixture
def collected(request):
    """The ids of the tests of this session, with and without their parameters."""
    names = request.config.stash[COLLECTED]
    return names | {name.partition("[")[0] for name in names}


@pytest.fixture
def repetitions(request):
    """Return a function: of `count` repetitions inside a test, how many to do in this run."""
    everything = request.config.getoption("--everything") == "all"
    return lambda count: count if everything else -(-count // TURNS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Turn an unexpected skip into a failure when --everything is given."""
    report = yield
    expected = any(part in item.nodeid for part in EXPECTED_SKIPS)
    allowed = expected or not item.config.getoption("--everything")
    if report.skipped and not hasattr(report, "wasxfail") and not allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped despite --everything: {report.longrepr}"
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


@pytest.fixture
def both(trained_with, tmp_path):
    """Run a pitfall's broken script and step 5, with the same changes to both."""

    def run_both(name, *changes, args=("1", *SMALL)):
        broken = patched(tmp_path, f"pitfalls/{name}", *changes)
        return finished(forked(broken, *args), tmp_path), trained_with("05", changes, args)

    return run_both


@pytest.fixture
def process_group():
    """Join a process group of which this process is the only member."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
