"""Changes for `scripts.edited` that act at a given position in a run of the scripts 02 to 05.

A position is an epoch and a training step in it, both counted from 0.
"""

import textwrap

BATCH = "            total[0] += self._run_batch(source, targets)\n"
# The scripts 02 and 03 do not count samples, because they always start with a whole epoch.
STEP = (
    'vars(self).get("samples_run", total[1] * dist.get_world_size())'
    " / (self.train_loader.batch_size * dist.get_world_size())"
)

ON_RANK_1 = "dist.get_rank() == 1"  # for the argument `when` of at()
SIGTERM = "signal.raise_signal(signal.SIGTERM)"  # the rank is told to stop
PATH = "        self.path = args.checkpoint_path\n"
RANK_1_LOOKS_ELSEWHERE = (PATH, f"{PATH}        self.path += '1' * dist.get_rank()\n")
KILLED = """\
if not os.path.exists(f"{self.path}.killed"):  # a restarted rank is not killed again
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
    """Return a change that runs `lines` before a step, on the ranks where `when` is true."""
    here = f"(self.epochs_run, {STEP}) == ({epoch}, {step})"
    text = f"if {here} and {when}:\n{textwrap.indent(lines, '    ')}"
    return BATCH, f"{textwrap.indent(text, ' ' * 12).rstrip()}\n{BATCH}"


def wait_at_the_gate(job):
    """Wait until a rank has reached GATE; return the file that opens it when it is touched."""
    job.wait_for((job.cwd / "checkpoint.pt.waiting").exists)
    return job.cwd / "checkpoint.pt.go"
