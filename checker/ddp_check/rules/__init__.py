"""The rules that a run is judged by.

A rule is a generator of verdicts on a run, of which the first counts; its docstring is its title.
If it gives none, it passes. To add one, write it in the module about its subject, and give it a
line in the table.
"""

from dataclasses import replace

from ddp_check import events
from ddp_check.ranks import counted
from ddp_check.rules import data, launch, output, training
from ddp_check.rules.base import BROKEN, Verdict, passed, unseen

SEEN = {  # kind of event: what is counted when a rule passes, and what is said if a run has none
    events.Step: ("step", "no optimizer took a step"),
    events.Wrap: ("model", "no model is wrapped in DistributedDataParallel"),
    events.Join: ("process group", "no process joined a process group"),
    events.PassBegun: ("DataLoader", "no DataLoader was used"),
    events.Collective: ("call", "the script calls no collective itself"),
    events.Clipped: ("call", "no gradient is clipped"),
    events.Evaluated: ("evaluation", "no model was called without gradients"),
    events.Gpu: ("GPU", "no GPU is named, or GPU calls were not translated (--translate yes)"),
    events.Print: ("line", "nothing is printed"),
    events.Save: ("save", "nothing is saved with torch.save"),
    events.Load: ("load", "an uninterrupted run loads nothing (--drill kill starts it again)"),
}
RULES = {  # rule: what it needs to have seen
    launch.script_ends: [],
    launch.one_group: [],
    launch.no_thread_left: [events.Join],
    training.values_are_finite: [events.Step],
    training.gradients_are_averaged: [events.Step],
    training.gradients_pass_collectives: [events.Collective, events.Step],
    training.rates_are_equal: [events.Step],
    training.clipping_sees_gradients: [events.Clipped],
    training.weights_agree: [],
    training.evaluated_models_agree: [events.Evaluated],
    data.ranks_share_data: [events.Step],
    data.order_changes: [events.Step, events.PassBegun],
    training.training_mode: [events.Step, events.Wrap],
    training.evaluation_mode: [events.Evaluated, events.PassBegun, events.Wrap],
    data.random_numbers_differ: [events.PassBegun],
    launch.own_gpu: [events.Gpu],
    output.one_rank_prints: [events.Print],
    output.one_rank_writes: [],
    output.plain_names: [events.Save],
    output.safe_loads: [events.Load],
    data.each_sample_is_evaluated_once: [events.PassBegun],
    launch.same_collectives: [events.Collective],
    training.unused_search_is_needed: [events.Step, events.Wrap],
    output.printed_loss_is_of_all: [events.Print, events.Step],
    output.accuracy_is_of_samples: [events.PassBegun, events.Print],
}


def judged(rule, run):
    """Return a rule's verdict on a run. If the rule breaks, that must not cost the whole report."""
    seen = {kind: run.all(kind) for kind in RULES[rule]}
    missing = [SEEN[kind][1] for kind, found in seen.items() if not found]
    try:
        verdict = unseen(missing[0]) if missing else next(rule(run), None)
    except Exception as error:
        verdict = Verdict(BROKEN, f"the checker does not understand this run: {error!r}")
    if verdict is None:
        (kind, found), *_ = seen.items()
        number = max(map(len, run.by_rank(kind).values()))
        verdict = passed(counted(number, SEEN[kind][0]), found[0].where)
    return replace(verdict, rule=rule.__name__, title=rule.__doc__)


def judge(run):
    """Return the verdicts of all rules."""
    return [judged(rule, run) for rule in RULES]
