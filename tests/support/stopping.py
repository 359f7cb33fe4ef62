"""Runs that are told to stop in the middle of an epoch."""

from support.jobs import run
from support.scripts import forked

STEP = "            total[0] += self._run_batch(source, targets)\n"
ALONE = "signal.raise_signal(signal.SIGTERM)"
WITH_WORKERS = "os.killpg(0, signal.SIGTERM)"  # all processes of the run, also loader workers


def told(epoch, samples=25 * 128, how=WITH_WORKERS):
    """Return the change with which rank 1 is told to stop after so many samples of an epoch.

    The ranks ask each other in every tenth step: with 25 batches of two times 64, five steps later.
    """
    here = f"(dist.get_rank(), self.epochs_run, self.samples_run) == (1, {epoch}, {samples})"
    return STEP, f"            if {here}:\n                {how}\n{STEP}"


def stopped(path, *args, samples=30 * 128, env=None):
    """Run a script that is told to stop, and check that it saved in mid-epoch."""
    job = run(forked(path, *args), path.parent, env)
    assert job.returncode != 0, job
    assert f"interrupted after {samples:,} samples" in job.stdout, job
    assert "accuracy" not in job.stdout, job
    return job
