"""The rules by which a run is judged. Equally severe verdicts are reported in this order."""

import traceback
from dataclasses import replace

from ddp_check import events
from ddp_check.ranks import counted
from ddp_check.rules import data, evaluation, gradients, launch, output, weights
from ddp_check.rules.base import BROKEN, Verdict, passed, unseen

SUBJECTS = {  # event -> (noun to count it with, reason for `not seen` if a run has none)
    events.Step: ("step", "no optimizer took a step"),
    events.Wrap: ("model", "no model is wrapped in DistributedDataParallel"),
    events.Join: ("process group", "no process joined a process group"),
    events.PassBegun: ("DataLoader", "no DataLoader was used"),
    events.Collective: ("call", "the script calls no collective itself"),
    events.Clipped: ("call", "no gradient is clipped"),
    events.Evaluated: ("evaluation", "no wrapped model was called without gradients"),
    events.Save: ("save", "nothing is saved with torch.save"),
}
RULES = {  # rule -> kinds of event without which the rule is `not seen`
    launch.script_ends: [],
    launch.one_group: [],
    gradients.values_are_finite: [events.Step],
    gradients.gradients_are_averaged: [events.Step],
    gradients.gradients_pass_collectives: [events.Collective, events.Step],
    gradients.rates_are_equal: [events.Step],
    gradients.clipping_comes_last: [events.Clipped],
    weights.weights_agree: [],
    data.ranks_share_data: [events.Step],
    data.order_changes: [events.Step, events.PassBegun],
    weights.training_mode: [events.Step, events.Wrap],
    weights.evaluation_mode: [events.Evaluated, events.PassBegun, events.Wrap],
    data.random_numbers_differ: [events.Step],
    output.one_rank_writes: [],
    output.plain_names: [events.Save],
    evaluation.each_sample_is_evaluated_once: [events.PassBegun],
    evaluation.result_is_of_all: [events.PassBegun],
}
assert {kind for kinds in RULES.values() for kind in kinds} <= SUBJECTS.keys()


def verdict_of(rule, run):
    """Return a rule's verdict on a run. An error in the rule must not prevent the report."""
    try:
        verdict = unseen_if_no_event(rule, run) or rule(run) or pass_of(rule, run)
    except Exception as error:
        text = f"the checker does not understand this run: {error!r}"
        verdict = Verdict(BROKEN, text, details=tuple(traceback.format_exc().splitlines()))
    return replace(verdict, rule=rule.__name__, title=rule.__doc__)


def unseen_if_no_event(rule, run):
    """Return an `unseen` verdict if a run lacks a kind of event that a rule needs."""
    for kind in RULES[rule]:
        if not run.all(kind):
            _, reason = SUBJECTS[kind]
            return unseen(reason)


def pass_of(rule, run):
    """Return the verdict of a rule that found no fault in what it looked at."""
    assert RULES[rule], f"{rule.__name__} needs no event, so it has to return a verdict"
    kind = RULES[rule][0]
    noun, _ = SUBJECTS[kind]
    number = max(map(len, run.by_rank(kind).values()))
    return passed(counted(number, noun), run.all(kind)[0].where)


def judge(run):
    """Return the verdicts of all rules."""
    return [verdict_of(rule, run) for rule in RULES]
