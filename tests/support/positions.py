"""Changes for `scripts.edited` that act at a given position in a run of steps 2 to 5.

A position is an epoch and a step in it, both counted from 0.
"""

import textwrap

from support.jobs import run
from support.scripts import forked

BATCH = "            total[0] += self._run_batch(source, targets)\n"
# Steps 2 and 3 do not count samples, since they always start at the beginning of an epoch.
STEP = (
    'vars(self).get("samples_run", total[1] * dist.get_world_size())'
    " / (self.train_loader.batch_size * dist.get_world_size())"
)

ON_RANK_1 = "dist.get_rank() == 1"
TOLD = "signal.raise_signal(signal.SIGTERM)"
TOLD_WITH_WORKERS = "os.killpg(0, signal.SIGTERM)"  # all processes of the run, also workers
KILLED = """\
if not os.path.exists(f"{self.path}.killed"):  # only once
    open(f"{self.path}.killed", "x").close()
    os.kill(os.getpid(), 9)
"""
GATE = """\
open(f"{self.path}.waiting", "w").close()
while not os.path.exists(f"{self.path}.go"):
    if globals().get("stop_signals"):  # a rank that is told to stop also releases the others
        open(f"{self.path}.go", "w").close()
    time.sleep(0.01)
"""


def at(epoch, step, lines, when="True"):
    """Return a change that runs these lines before a step, on ranks where `when` is true."""
    here = f"(self.epochs_run, {STEP}) == ({epoch}, {step})"
    text = f"if {here} and {when}:\n{textwrap.indent(lines, '    ')}"
    return BATCH, f"{textwrap.indent(text, ' ' * 12).rstrip()}\n{BATCH}"


def wait_at_the_gate(job):
    """Wait until a rank has reached the gate."""
    job.wait_for((job.cwd / "checkpoint.pt.waiting").exists)


def open_the_gate(job):
    (job.cwd / "checkpoint.pt.go").touch()


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
