"""Changes to step 5, its recipes and its pitfalls: what they print, when they stop."""

from support.positions import BATCH
from support.scripts import on_each_rank

STEPS = 102  # per epoch, with two ranks and SMALL
STEP = "        self.optimizer.step()\n"
TRAIN = "    trainer.train("
TRAINED = "    if not trainer.interrupted:\n"  # before evaluation
ENDED = "    return trainer.interrupted"
IMPATIENT = ("timedelta(minutes=5)", "timedelta(seconds=5)")
ALL = "os.killpg(0, signal.SIGTERM)"  # tells a rank and its DataLoader workers to stop
RESUMED = '        log(f"resuming from '
AT_ONCE = (RESUMED, f"        stop_signals.append(signal.SIGTERM)\n{RESUMED}")
RESTARTS = 'int(os.environ["TORCHELASTIC_RESTART_COUNT"])'
PROFILED = (TRAIN, f"    with torch.profiler.profile(record_shapes=True) as profiler:\n    {TRAIN}")
EVENTS = "profiler.profiler.kineto_results.events()"  # `profiler.events()` takes seconds
# The kernel on a GPU is an event of the same name, without shapes.
REDUCED = "e.name() in ('gloo:all_reduce', 'nccl:all_reduce') and e.shapes()"
SENT = f"[(e.dtypes()[0], e.shapes()[0]) for e in {EVENTS} if {REDUCED}]"


def stop_on_rank_1(epoch, samples=25 * 128):
    """Return the change that stops rank 1; the ranks agree on it in their next tenth step."""
    here = f"(dist.get_rank(), self.epochs_run, self.samples_run) == (1, {epoch}, {samples})"
    return BATCH, f"            if {here}:\n                {ALL}\n{BATCH}"


def printed_at_the_end(expression, end=ENDED):
    """Return the change with which each rank prints an expression after training."""
    return end, f"    {on_each_rank(expression)}{end}"
