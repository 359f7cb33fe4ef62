"""Recipes that are told to stop, and what they save then."""

from support.jobs import run
from support.positions import BATCH
from support.scripts import forked

TOLD_WITH_WORKERS = "os.killpg(0, signal.SIGTERM)"  # all processes of the run, also workers


def told(epoch, samples=25 * 128, how=TOLD_WITH_WORKERS):
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


RESUMED = '        log(f"resuming from '
AT_ONCE = (RESUMED, f"        stop_signals.append(signal.SIGTERM)\n{RESUMED}")


def writes_nothing_again(path, *args):
    """Resume a script that is told to stop AT_ONCE; no file in its checkpoint's folder changes."""

    def written():
        return {file: file.stat().st_mtime_ns for file in path.parent.glob("*/*.distcp")}

    before = written()
    stopped(path, *args, samples=0)
    assert [*path.parent.glob("*.pt.interrupted")]
    assert written() == before
