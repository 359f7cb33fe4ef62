"""Runs recipes and pitfalls: to the end, stopped in mid-epoch, or until they fail."""

from dataclasses import dataclass
from pathlib import Path

import torch
from changes import stop_on_rank_1
from patching import on_screen, patched
from support.jobs import run
from support.results import resumed, weights
from support.scripts import ROOT, SMALL, forked

ONE, TWO = ("1", *SMALL), ("2", *SMALL)
FEW = ("1", "--batch-size=512", "--width=4")  # steps


@dataclass
class Patched:
    """The script that a page makes, like "more/recipes/fsdp2", and the folder it runs in."""

    page: str
    folder: Path

    def at(self, name):
        """Return the same script in a folder inside this one."""
        (self.folder / name).mkdir(exist_ok=True)
        return Patched(self.page, self.folder / name)

    def ran(self, *changes, args=ONE, env=None, code=0, start=forked, **options):
        """Run it with changes to its end; return the Job."""
        script = patched(self.folder, self.page, *changes)
        job = run(start(script, *args, **options), self.folder, env)
        assert job.returncode == code, job
        return job

    def refused(self, *changes, **options):
        """Run it until it fails as its page says; return the Job."""
        job = self.ran(*changes, code=1, **options)
        assert all(text in job.stderr for text in on_screen(self.page)), job
        return job

    def stopped(self, *changes, samples=30 * 128, **options):
        """Run it until it is told to stop, and check that it saves in mid-epoch."""
        job = self.ran(*changes, code=1, **options)
        assert f"interrupted after {samples:,} samples" in job.stdout, job
        assert "accuracy" not in job.stdout, job
        return job

    def with_and_without_a_stop(self, *changes, args=ONE, others=((), ())):
        """Run it with a stop in mid-epoch, and without; both must leave the same checkpoint."""
        own = [*others[0], stop_on_rank_1(0)]  # changes of the first run alone
        stopped = self.at("stopped").ran(*changes, *own, args=args, restarts=1)
        undisturbed = self.at("undisturbed").ran(*changes, *others[1], args=args)
        assert "interrupted after 3,840 samples" in stopped.stdout, stopped
        assert [resumed(job) for job in (stopped, undisturbed)] == [[0], []]
        assert same(saved(stopped), saved(undisturbed))
        return stopped, undisturbed


def saved(job, name="checkpoint.pt"):
    """Return what a job has saved in a file."""
    return torch.load(job.cwd / name, map_location="cpu", weights_only=True)


def same_but_for_rounding(a, b):
    """Check that the weights of two jobs, in double precision, are equal."""
    torch.testing.assert_close(weights(a), weights(b), rtol=0, atol=1e-9)


def same(a, b):
    """Return whether two states, nested dicts of tensors, are bit-for-bit identical."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):  # optimizers return betas as either
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def patch_of(request, folder, kind):
    """Return the recipe or pitfall with whose name that of the test begins."""
    test = request.function.__name__.removeprefix("test_")
    names = [page.stem for page in ROOT.glob(f"{kind}/*.md") if test.startswith(page.stem)]
    return Patched(f"{kind}/{max(names, key=len)}", folder)
