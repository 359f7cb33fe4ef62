"""Helpers that run the scripts as real processes and leave none of them behind."""

import contextlib
import hashlib
import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import patches
import psutil
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("0[1-9]_*.py"))
SCRIPT = {path.name[:2]: path for path in SCRIPTS}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
ON_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
SMALL = ("--batch-size=64", "--width=4")  # trains in a second, for tests of anything but learning
LONG = ("4", *SMALL)  # enough epochs to interrupt
# Parts of the ids of tests that may be skipped even with --everything: they need GPUs, or version 1
# of control groups.
EXPECTED_SKIPS = ("[nccl-", "test_out_of_memory")


# ---------------------------------------------------------------- the --everything option


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="also run the slow tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "everything: takes minutes, runs only with --everything")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--everything"):
        for item in items:
            if item.get_closest_marker("everything"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: run pytest --everything"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Turn an unexpected skip into a failure when --everything is given."""
    report = yield
    expected = any(part in item.nodeid for part in EXPECTED_SKIPS)
    allowed = expected or not item.config.getoption("--everything")
    if report.skipped and not hasattr(report, "wasxfail") and not allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped in spite of --everything: {report.longrepr}"
    return report


# ---------------------------------------------------------------- starting scripts


class Job:
    """A running script and all its descendants; leaving its `with` block kills what is left."""

    def __init__(self, command, cwd, env=None):
        self.mark = uuid.uuid4().hex  # inherited by every descendant, even by orphans
        self.command, self.cwd = [str(word) for word in command], Path(cwd)
        self.paths = [self.cwd / f".{self.mark}.{name}" for name in ("stdout", "stderr")]
        # Restarts need it; others go without, as it chooses a port long before it listens there.
        restarts = any("--max-restarts" in word for word in self.command)
        store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(path.open("wb")) for path in self.paths)
            self.process = subprocess.Popen(
                self.command,
                cwd=cwd,
                env=environment(DDP_LADDER_JOB=self.mark, **{**store, **(env or {})}),
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
        return printed(self.paths[0])

    @property
    def stderr(self):
        return self.paths[1].read_text(encoding="utf-8")

    def processes(self):
        """Return all processes of this job that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                living = process.status() != psutil.STATUS_ZOMBIE
                if living and process.environ().get("DDP_LADDER_JOB") == self.mark:
                    found.append(process)
        return found

    def workers(self):
        """Return the worker processes of torchrun, by global rank."""
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
        """Wait until `what()` is true or, for a string, until stdout matches that pattern."""
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

    def __getstate__(self):
        """Keep what others can look at when the job has ended."""
        return {**vars(self), "process": None}

    def __repr__(self):
        words, code = " ".join(self.command), self.process.poll() if self.process else 0
        return f"{words}\nexit {code}\n{self.stdout}\n---- stderr\n{self.stderr}"


def printed(path):
    """Return the text in a file without the greetings of gloo, which PyTorch 2.8 prints."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^.*(?:\[Gloo\]|peer ranks).*\n", "", text, flags=re.MULTILINE)


def environment(**changes):
    """Return this process's environment with what would differ between machines set or removed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **changes}
    same = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*same, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        env[name] = changes.get(name)
    return {name: value for name, value in env.items() if value is not None}


def command(step, *args, nprocs=2, torchrun=()):
    """Return the command that runs a step, or an edited copy of it, with `nprocs` processes."""
    path = SCRIPT.get(step, step)
    if path.name.startswith("01"):
        return [sys.executable, path, *args]
    if path.name.startswith("02"):
        return [sys.executable, path, f"--nprocs={nprocs}", *args]
    return [TORCHRUN, "--standalone", f"--nproc-per-node={nprocs}", *torchrun, path, *args]


def forked(path, *args, nprocs=2, restarts=0):
    """Return the command that runs a step or a copy of one without torchrun, in less time."""
    return [sys.executable, ROOT / "tests" / "launcher.py", nprocs, restarts, path, *args]


def run(command, cwd, env=None, timeout=300):
    """Run a command until it exits, and check that it leaves no process behind."""
    with Job(command, cwd, env) as job:
        job.wait(timeout).wait_until_gone()
    return job


def finished(command, cwd, env=None, timeout=300):
    """Run a command and check that it succeeds."""
    job = run(command, cwd, env, timeout)
    assert job.returncode == 0, job
    return job


@pytest.fixture(scope="session")
def trained_with(request, tmp_path_factory):
    """Run an edited step to completion, once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base

    def train(step, changes, args, **options):
        key = repr((step, changes, args, sorted(options.items())))
        done = shared / hashlib.sha256(key.encode()).hexdigest()
        with FileLock(f"{done}.lock", timeout=600):
            if not done.exists():
                cwd = tmp_path_factory.mktemp(f"step{step}")
                start = command(step, *args, **options)
                if changes:
                    start = forked(edited(cwd, step, *changes), *args, **options)
                job = finished(start, cwd)
                done.write_bytes(pickle.dumps(job))
            return pickle.loads(done.read_bytes())

    return train


@pytest.fixture(scope="session")
def trained(trained_with):
    """Run a step to completion."""
    return lambda step, *args, **options: trained_with(step, (), args, **options)


@pytest.fixture
def both(trained_with, tmp_path):
    """Run the script that a pitfall breaks, and step 5 itself, with the same changes to both."""

    def run_both(name, *changes, args=("1", *SMALL)):
        broken = patched(tmp_path, f"pitfalls/{name}", *changes)
        return finished(forked(broken, *args), tmp_path), trained_with("05", changes, args)

    return run_both


def edited(tmp_path, step, *changes):
    """Write a copy of a step with some of its text replaced, each piece found exactly once."""
    return write(tmp_path / SCRIPT[step].name, SCRIPT[step].read_text(encoding="utf-8"), changes)


def patched(tmp_path, name, *changes):
    """Write a recipe or pitfall, like "recipes/fsdp2", under the name of the step that it patches.

    More of its text is replaced as in `edited`.
    """
    patch = patches.read(ROOT, ROOT / "diffs" / f"{name}.diff")
    return write(tmp_path / patch.diff.old.name, patch.result, changes)


def write(path, text, changes):
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path.name}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


def on_screen(name):
    """Return what the symptoms of a recipe or pitfall quote from the screen."""
    rows = patches.read(ROOT, ROOT / "diffs" / f"{name}.diff").rows
    return [text for symptom, *_ in rows for text in re.findall(r"`([^`]+)`", symptom)]


def kill(process, number=signal.SIGKILL):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


# ---------------------------------------------------------------- looking inside

END = "    dist.barrier()"  # where each script has finished


def on_each_rank(expression):
    """Return a line that prints the value of an expression after the rank."""
    line = f"'rank {{}}: {{}}\\n'.format(dist.get_rank(), ({expression}))"
    return f"print({line}, end='', flush=True)\n"


def said(job, rank):
    """Return what on_each_rank printed on a rank."""
    return re.findall(f"^rank {rank}: (.*)$", job.stdout, re.MULTILINE)


def digest(tensors):
    """Return an expression for a checksum of the bits of some tensors."""
    return f"__import__('zlib').crc32(b''.join(t.detach().numpy().tobytes() for t in {tensors}))"


# ---------------------------------------------------------------- looking at results


def weights(job_or_path):
    """Return the weights in the checkpoint of a job, or in a file, by name."""
    path = job_or_path.cwd / "checkpoint.pt" if isinstance(job_or_path, Job) else job_or_path
    return torch.load(path, weights_only=True)["MODEL_STATE"]


def same_bits(a, b):
    """Return whether two jobs or files hold the same weights, bit for bit."""
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def accuracy(job):
    """Return percent, correct and total from the last line of the output."""
    match = re.fullmatch(r"accuracy ([\d.]+)% \((\d+)/(\d+)\)", job.stdout.splitlines()[-1])
    assert match, job
    return float(match[1]), int(match[2]), int(match[3])


def epochs(job):
    """Return the numbers of the epochs that were printed."""
    return [int(number) for number in re.findall(r"^epoch (\d+) ", job.stdout, re.MULTILINE)]


def losses(job):
    """Return the losses that were printed, as text."""
    return re.findall(r"^epoch \d+  loss ([\d.]+)  ", job.stdout, re.MULTILINE)


def resumed(job):
    """Return the number of finished epochs for each time the job resumed."""
    return [int(n) for n in re.findall(r"^resuming from .* after epoch (\d+)$", job.stdout, re.M)]


def error_lines(job):
    """Return the distinct last lines of tracebacks, and argparse's errors, without the ranks."""
    pattern = r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception): .+|0\d_\w+\.py: error: .+)$"
    return sorted(set(re.findall(pattern, job.stderr, re.MULTILINE)))


# ---------------------------------------------------------------- scripts as modules


def load(step):
    """Import a step's script."""
    spec = importlib.util.spec_from_file_location(f"step{step}", SCRIPT[step])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(path, **changes):
    """Return what parse_args returns, for a tiny model."""
    values = {"total_epochs": 1, "save_every": 1, "batch_size": 64, "lr": 4e-3, "width": 1}
    return SimpleNamespace(**{**values, "seed": 0, "checkpoint_path": str(path), **changes})


def build_trainer(module, args):
    """Build a step's trainer the way its main does, on the CPU."""
    torch.manual_seed(args.seed)
    train_set, _ = module.load_datasets()
    model = module.build_model(args.width).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    data = module.prepare_dataloader(train_set, args)
    return module.Trainer(model, data, optimizer, torch.device("cpu"), args)


@pytest.fixture
def process_group():
    """Join a process group that has this process as its only member."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
