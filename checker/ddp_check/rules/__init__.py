"""The rules that a run is judged by.

A rule is a generator of verdicts on a run, of which the first counts; its docstring is its title.
To add one, write it in the module about its subject, and give it a line in the table.
"""

from dataclasses import replace

from ddp_check import events
from ddp_check.rules import data, launch, output, training
from ddp_check.rules.base import BROKEN, Verdict, unseen

MISSING = {  # kind of event: what is said if a run has none
    events.Step: "no optimizer took a step",
    events.Wrap: "no model is wrapped in DistributedDataParallel",
    events.Join: "no process joined a process group",
    events.PassBegun: "no DataLoader was used",
    events.Collective: "the script calls no collective itself",
    events.Clipped: "no gradient is clipped",
    events.Evaluated: "no model was called without gradients",
    events.Gpu: "no GPU is named, or GPU calls were not translated (--translate yes)",
    events.Print: "nothing is printed",
    events.Save: "nothing is saved with torch.save",
    events.Load: "an uninterrupted run loads nothing (--drill kill starts it again)",
}
TABLE = {  # rule: what it needs to have seen
    launch.script_ends: [],
    launch.one_group: [],
    launch.no_thread_left: [events.Join],
    training.values_are_finite: [events.Step],
    training.gradients_are_averaged: [events.Step],
    training.gradients_pass_collectives: [events.Step, events.Collective],
    training.rates_are_equal: [events.Step],
    training.clipping_sees_gradients: [events.Clipped],
    training.weights_agree: [],
    training.evaluated_models_agree: [events.Evaluated],
    data.ranks_share_data: [events.Step],
    data.order_changes: [events.Step, events.PassBegun],
    training.training_mode: [events.Step, events.Wrap],
    training.evaluation_mode: [events.Wrap, events.PassBegun],
    data.random_numbers_differ: [events.PassBegun],
    launch.own_gpu: [events.Gpu],
    output.one_rank_prints: [events.Print],
    output.one_rank_writes: [],
    output.plain_names: [events.Save],
    output.safe_loads: [events.Load],
    data.each_sample_is_evaluated_once: [events.PassBegun],
    launch.same_collectives: [events.Collective],
    training.unused_search_is_needed: [events.Step, events.Wrap],
    output.printed_loss_is_of_all: [events.Step, events.Print],
    output.accuracy_is_of_samples: [events.PassBegun, events.Print],
}


class Rule:
    def __init__(self, judges, needs):
        self.judges, self.needs = judges, needs
        self.name, self.title = judges.__name__, judges.__doc__

    def __call__(self, run):
        """Return the verdict on a run. If the rule breaks, that must not cost the whole report."""
        missing = [MISSING[kind] for kind in self.needs if not run.all(kind)]
        try:
            verdict = unseen(missing[0]) if missing else next(self.judges(run))
        except Exception as error:
            verdict = Verdict(BROKEN, f"the checker does not understand this run: {error!r}")
        return replace(verdict, rule=self.name, title=self.title)


RULES = [Rule(*row) for row in TABLE.items()]


def judge(run):
    """Return the verdicts of all rules."""
    return [rule(run) for rule in RULES]
