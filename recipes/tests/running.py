"""Runs recipes: to the end, stopped in mid-epoch, or until they fail as their page says."""

import re
from types import ModuleType

import torch
from patching import on_screen, patched, text_of
from support.jobs import finished, run
from support.positions import BATCH, TOLD
from support.results import resumed, same_bits, weights
from support.scripts import SMALL, forked, on_each_rank

ONE, TWO = ("1", *SMALL), ("2", *SMALL)
STEPS = 102  # per epoch, with two ranks and SMALL
STEP = "        self.optimizer.step()\n"
TRAIN = "    trainer.train("
TRAINED = "    return 75 if trainer.interrupted"  # after training and evaluation
LENGTH = [  # of the loader: how many batches it yields, also after a stop
    ("        start = time", "        expected = len(self.train_loader)\n        start = time"),
    (
        "        dist.all_reduce(total)",
        "        assert step + 1 == expected\n        dist.all_reduce(total)",
    ),
]
IMPATIENT = ("timedelta(minutes=5)", "timedelta(seconds=5)")
ALL = "os.killpg(0, signal.SIGTERM)"  # tells all processes of a run to stop, also workers
RESUMED = '        log(f"resuming from '
AT_ONCE = (RESUMED, f"        stop_signals.append(signal.SIGTERM)\n{RESUMED}")
# With DDP's own hook written in Python, SENT lists the types and sizes of what a rank all-reduces.
SENT = (
    "stop_signals = ",
    """SENT, reduce = [], dist.all_reduce
dist.all_reduce = lambda t, *a, **o: SENT.append((str(t.dtype), t.numel())) or reduce(t, *a, **o)
stop_signals = """,
)
HOOKED = f"""\
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    trainer.model.register_comm_hook(None, allreduce_hook)
{TRAIN}"""


def script(folder, name, *changes):
    """Write a recipe with changes into a folder; return the path."""
    folder.mkdir(exist_ok=True)
    return patched(folder, f"recipes/{name}", *changes)


def ran(folder, name, *changes, args=ONE, nprocs=2, restarts=0):
    """Run a recipe to its end; return the Result."""
    path = script(folder, name, *changes)
    return finished(forked(path, *args, nprocs=nprocs, restarts=restarts), folder)


def refused(folder, name, *changes, args=ONE):
    """Run a recipe that fails with the first message of its page; return the Result."""
    job = run(forked(script(folder, name, *changes), *args), folder)
    assert job.returncode == 1, job
    assert on_screen(f"recipes/{name}")[0] in job.stderr, job
    return job


def told(epoch, samples=25 * 128, how=ALL):
    """Return the change with which rank 1 is told to stop after so many samples of an epoch.

    The ranks ask each other in every tenth step: with 25 batches of two times 64, five steps later.
    """
    here = f"(dist.get_rank(), self.epochs_run, self.samples_run) == (1, {epoch}, {samples})"
    return BATCH, f"            if {here}:\n                {how}\n{BATCH}"


def stopped(path, *args, samples=30 * 128, env=None):
    """Run a script that is told to stop, and check that it saved in mid-epoch."""
    job = run(forked(path, *args), path.parent, env)
    assert job.returncode != 0, job
    assert f"interrupted after {samples:,} samples" in job.stdout, job
    assert "accuracy" not in job.stdout, job
    return job


def writes_nothing_again(path, *args):
    """Resume a script that is told to stop AT_ONCE; no file in its checkpoint's folder changes."""

    def written():
        return {file: file.stat().st_mtime_ns for file in path.parent.glob("*/*.distcp")}

    before = written()
    stopped(path, *args, samples=0)
    assert [*path.parent.glob("*.pt.interrupted")]
    assert written() == before


def with_and_without_a_stop(folder, name, *changes):
    """Run a recipe twice, once with a stop mid-epoch; check that the weights are identical."""
    stopped = ran(folder / "stopped", name, *changes, told(0, how=TOLD), restarts=1)
    undisturbed = ran(folder / "undisturbed", name, *changes)
    assert "interrupted after 3,840 samples" in stopped.stdout, stopped
    assert [resumed(job) for job in (stopped, undisturbed)] == [[0], []]
    assert same_bits(stopped, undisturbed)
    return stopped, undisturbed


def said_at_the_end(expression):
    """Return the change with which each rank prints an expression after training."""
    return TRAINED, f"    {on_each_rank(expression)}{TRAINED}"


def saved(job, name):
    """Return an entry of a job's checkpoint."""
    return torch.load(job.cwd / "checkpoint.pt", weights_only=True)[name]


def module(name):
    """Return a recipe as a module."""
    recipe = ModuleType(name)
    exec(text_of(f"recipes/{name}"), recipe.__dict__)
    return recipe


def printed(pattern, job):
    """Return what lines of a job's output match."""
    return re.findall(f"^{pattern}$", job.stdout, re.MULTILINE)


def difference(a, b):
    """Return the largest difference between the weights of two jobs."""
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max() for name in a)


def same(a, b):
    """Return whether two states, nested dicts of tensors, are bit-for-bit identical."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):  # optimizers return betas as either
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b
