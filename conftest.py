"""What the tests in all folders share: which of them run, and fixtures that train a step."""

import os
import signal
import tempfile
import textwrap
from collections import Counter, defaultdict

import pytest
from support import gpus, server
from support.jobs import RESTARTS, Job, finished, free_port
from support.once import FOLDER, once
from support.positions import GATE, KILLED, ON_RANK_1, at, wait_at_the_gate
from support.scripts import (
    FOUR_EPOCHS,
    SCRIPT,
    TORCHRUN,
    command,
    digest,
    edited,
    forked,
    load,
    on_each_rank,
)

# ---------------------------------------------------------------- what runs


def pytest_addoption(parser):
    parser.addoption("--gpus", action="store_true", help="run what is marked gpu, on GPUs")


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore SIGINT
    os.environ.pop("PYTHONUNBUFFERED", None)  # it would split the lines that ranks print
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise, each process would use all cores
    if config.option.gpus:
        import torch

        config.option.markexpr = "gpu"
        os.environ.setdefault(gpus.VARIABLE, str(torch.cuda.device_count()))
        if not gpus.count():
            raise pytest.UsageError("no GPU here, or a PyTorch without CUDA")
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="trained-")
        config.add_cleanup(folder.cleanup)
        os.chmod(folder.name, 0o1777)  # the same mode as /tmp
        os.environ[FOLDER] = os.environ["TMPDIR"] = folder.name  # torchrun leaves a folder there
    if getattr(config.option, "numprocesses", None):
        server.start()  # one server for all workers of pytest-xdist, which inherit its address


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Turn a skip into a failure in CI, where only GPUs may be missing."""
    report = yield
    unexpected = report.skipped and "GPU" not in str(report.longrepr)
    if unexpected and not hasattr(report, "wasxfail") and "CI" in os.environ:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter):
    """Print a line for each file, because with `-n`, the lines of several files are mixed."""
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
def trained_with():
    """Return a function that runs an edited step to the end on forked ranks, once for all tests."""

    def train(step, changes, args, nprocs=2):
        def make(cwd):
            (cwd / ".script").mkdir()
            script = edited(cwd / ".script", step, *changes)
            return finished(forked(script, *args, nprocs=nprocs), cwd)

        return once(("forked", step, changes, args, nprocs), make)

    return train


@pytest.fixture(scope="session")
def trained(trained_with):
    """Return a function that runs a step to the end on forked ranks, once for all tests."""
    return lambda step, *args, **options: trained_with(step, (), args, **options)


@pytest.fixture
def build_trainer(tmp_path, monkeypatch):
    """Return a function that builds a step's Trainer in this process, with 256 of the digits.

    The process is the only member of its process group.
    """
    import torch

    monkeypatch.chdir(tmp_path)  # the checkpoint is saved there
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def build(step, *args):
        module = load(step)
        monkeypatch.setattr("sys.argv", [step, "--width=1", "--batch-size=64", *args])
        args = module.parse_args()
        torch.manual_seed(args.seed)
        digits = torch.utils.data.Subset(module.load_datasets()[0], range(256))
        model = module.build_model(args.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        loader = module.prepare_dataloader(digits, args)
        return module.Trainer(model, loader, optimizer, torch.device("cpu"), args)

    yield build
    torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- runs with their own launchers

TRAINED = "    trainer.train(args.total_epochs, args.save_every)\n"
TWO_CORES = "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"


@pytest.fixture(scope="session")
def spawned():
    """Return a function that runs step 2 with mp.spawn on two cores, and returns the Job.

    Each rank prints its number of threads and, after training, a checksum of its weights.
    """

    def make(cwd):
        says = on_each_rank("torch.get_num_threads()") + on_each_rank(digest("model.parameters()"))
        changes = [
            ("import torch\n", f"{TWO_CORES}import torch\n"),
            (TRAINED, TRAINED + textwrap.indent(says, "    ")),
        ]
        script = edited(cwd, "02", *changes)
        return finished(command(script, *FOUR_EPOCHS), cwd, {"OMP_NUM_THREADS": None})

    return lambda: once("spawned", make)


@pytest.fixture(scope="session")
def disturbed():
    """Return a function that runs step 4 with torchrun and loader workers.

    In epoch 2, rank 1 is killed, and torchrun restarts all ranks. In epoch 3, torchrun receives
    SIGTERM. The function returns the Job.
    """

    def make(cwd):
        script = edited(cwd, "04", at(1, 20, KILLED, ON_RANK_1), at(2, 15, GATE))
        start = command(script, *FOUR_EPOCHS, "--num-workers=1", torchrun=("--max-restarts=1",))
        with Job(start, cwd, RESTARTS) as job:
            wait_at_the_gate(job)
            job.process.send_signal(signal.SIGTERM)
            job.wait().wait_until_gone()
        assert (cwd / "checkpoint.pt.interrupted").exists(), job
        return job

    return lambda: once("disturbed", make)


@pytest.fixture(scope="session")
def two_nodes():
    """Return a function that runs step 4 on two nodes, and returns the Job of each.

    Each node is a torchrun process (an agent) in a folder of its own. The agents find each other
    through c10d at one address, and share only the checkpoint.
    """

    def run(nproc_per_node):
        def make(cwd):
            words = [TORCHRUN, "--nnodes=2", f"--nproc-per-node={nproc_per_node}"]
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
            words += [SCRIPT["04"], *FOUR_EPOCHS, f"--checkpoint-path={cwd / 'checkpoint.pt'}"]
            folders = [cwd / "node0", cwd / "node1"]
            for folder in folders:
                folder.mkdir()
            with Job(words, folders[0]) as zero, Job(words, folders[1]) as one:
                return [job.wait().wait_until_gone() for job in (zero, one)]

        return once(("two nodes", nproc_per_node), make)

    return run
