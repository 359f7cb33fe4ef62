"""The rules that a run is judged by.

A rule is a generator of verdicts on a run, of which the first counts. To add one, write it in the
module about its subject, and give it a line in the table.
"""

from dataclasses import dataclass

from ddp_check import events
from ddp_check.rules import data, launch, output, training
from ddp_check.rules.base import BROKEN, UNSEEN, Verdict

STEP, WRAP, JOIN = (
    (events.Step, "no optimizer took a step"),
    (events.Wrap, "no model is wrapped in DistributedDataParallel"),
    (events.Join, "no process joined a process group"),
)
LOADER = events.PassBegun, "no DataLoader was used"
CALL = events.Collective, "the script calls no collective itself"
TABLE = {  # rule: its title, and what it needs to have seen
    launch.script_ends: ("the script ends", []),
    launch.one_group: ("one process group, destroyed at the end", []),
    launch.no_thread_left: ("no gloo thread is left at exit", [JOIN]),
    training.values_are_finite: ("losses, gradients and weights are finite", [STEP]),
    training.gradients_are_averaged: ("each step takes the mean gradient of all ranks", [STEP]),
    training.gradients_pass_collectives: ("gradients pass what is gathered", [STEP, CALL]),
    training.rates_are_equal: ("all ranks have the same learning rate", [STEP]),
    training.clipping_sees_gradients: (
        "gradients are clipped when no scale is in them",
        [(events.Clipped, "no gradient is clipped")],
    ),
    training.weights_agree: ("all ranks wrap the same model, and end with the same weights", []),
    training.evaluated_models_agree: (
        "all ranks evaluate the same model, buffers included",
        [(events.Evaluated, "no model was called without gradients")],
    ),
    data.ranks_share_data: ("the ranks share out the data", [STEP]),
    data.order_changes: ("the order changes from epoch to epoch", [STEP, LOADER]),
    training.training_mode: ("the model is in training mode in each step", [STEP, WRAP]),
    training.evaluation_mode: (
        "the model is in evaluation mode when it is evaluated",
        [WRAP, LOADER],
    ),
    data.random_numbers_differ: ("ranks draw different random numbers in training", [LOADER]),
    launch.own_gpu: (
        "each rank uses a GPU of its own",
        [(events.Gpu, "the script names no GPU, or its calls were not translated")],
    ),
    output.one_rank_prints: (
        "one rank prints the progress",
        [(events.Print, "nothing is printed")],
    ),
    output.one_rank_writes: (
        "one rank writes each file, whole or not at all",
        [((events.Opened, events.Save, events.Renamed), "no file is written")],
    ),
    output.plain_names: (
        "saved names do not begin with module.",
        [(events.Save, "nothing is saved with torch.save")],
    ),
    output.safe_loads: (
        "checkpoints are loaded with weights_only=True",
        [(events.Load, "nothing is loaded: run it again with a checkpoint (--drill kill)")],
    ),
    data.each_sample_is_evaluated_once: ("the evaluation sees each sample once", [LOADER]),
    data.held_out_is_not_trained_on: ("no sample is both trained on and evaluated", [LOADER]),
    launch.same_collectives: ("all ranks call the same collectives in the same order", [CALL]),
    training.unused_search_is_needed: (
        "find_unused_parameters is set only where it is needed",
        [STEP, WRAP],
    ),
    output.printed_loss_is_of_all: (
        "printed values are summed over all ranks",
        [STEP, (events.Print, "nothing is printed")],
    ),
    output.to_be_checked_by_hand: ("what you must check yourself", []),
}


@dataclass
class Rule:
    """A row of the table."""

    name: str
    title: str
    needs: list
    judges: object

    def __call__(self, run):
        """Return the verdict on a run. If the rule breaks, that must not cost the whole report."""
        for kinds, missing in self.needs:
            if not run.all(*(kinds if isinstance(kinds, tuple) else [kinds])):
                return Verdict(UNSEEN, missing)
        try:
            return next(self.judges(run))
        except Exception as error:
            return Verdict(BROKEN, f"the checker does not understand this run: {error!r}")


RULES = [Rule(function.__name__, *row, function) for function, row in TABLE.items()]


def judge(run):
    """Return the verdicts of all rules: [(title, verdict)]."""
    return [(rule.title, rule(run)) for rule in RULES]
