"""The drill that compares N processes with one process that has N times the batch.

In both runs, the observer removes the differences that are not faults, such as dropout
(observer/level.py). Any difference that is left is a fault of the script.
"""

import re
from functools import partial
from itertools import accumulate, chain, takewhile

import torch

from ddp_check import events
from ddp_check.drills.resume import act_when, count_steps
from ddp_check.keeper import signal_processes
from ddp_check.numbers import close, distance, ratio
from ddp_check.protocol import STEPS
from ddp_check.ranks import counted, short
from ddp_check.rules import launch
from ddp_check.rules.base import passed, unseen, unsure, wrong
from ddp_check.rules.gradients import PAGE

TOLERANCE = 1e-5  # allowed error of a float64 gradient, relative to its largest value
REMEDY = "draw them in __getitem__ from a global generator, or leave them out for this check"
BY_BATCH_SIZE = r"(loss|sum).*[^/]/\s*[\w.\['\"]*batch_size"  # as in loss.sum() / args.batch_size
COUNT_TOLERANCE = 0.3  # allowed relative difference of sample counts, because loaders fetch ahead
NO_MULTIPLE = (
    "the gradients are no multiple of those of one process. This is right if the loss or the model "
    "combines the samples of a rank, as a contrastive loss with local negatives or a normalization "
    "over the batch does. Otherwise, look for a mean over a number of elements that differs from "
    "rank to rank (a mask, padding), or for gathered values in another order"
)


def world_size(plan):
    """N processes train like one with N times the batch"""
    yield "the steps agree", steps_agree(plan)


def cannot_compare(run):
    """Return why the steps cannot be compared, judging by the undisturbed run, or ""."""
    if run.returncode != 0 and len(run.steps) <= STEPS:
        return f"the script fails without the drill: {launch.script_ends(run).text}"
    if run.nproc == 1:
        return "there is one process only: run it with --nproc 2"
    if not run.all(events.Wrap):
        return "no model is wrapped in DistributedDataParallel"
    if run.has_own_exchange:
        return "the ranks average their weights: one process does something else"
    return ""


def steps_agree(plan):
    """Return the verdict on the first steps of N processes, compared with those of one."""
    kill_all = partial(signal_processes, method="kill")
    after_some_steps = partial(act_when, lambda seen: count_steps(seen) > STEPS, kill_all)
    many = plan.run("many", scale=1, during=after_some_steps)
    if reason := no_gradients_kept(many):
        return unseen(reason)
    one, remark = run_in_one_process(plan, many, after_some_steps)
    if reason := no_gradients_kept(one):
        return unseen(reason)
    if (one.world_size, many.world_size) != (1, plan.nproc):  # the script starts its ranks itself
        return unseen(f"{one.world_size} and {many.world_size} ranks, not 1 and {plan.nproc}")
    if verdict := chance_in(many) or chance_in(one):
        return verdict
    if reason := samples_differ(many, one):
        return unseen(reason)
    rates = other_rates(many, one)
    # Different rates make the weights differ, so only the gradients of step 1 are compared.
    count = 1 if rates else steps_with_same_samples(many, one)
    for number in range(1, count + 1):
        if verdict := other_gradients(many, one, number):
            return verdict
    if cuts_gradients(many):
        return unseen("a collective returns no gradient to the loss, and both runs lack it")
    text = f"samples, learning rates and gradients of {counted(count, 'step')}, in float64"
    return rates or passed(f"{text}, to within {TOLERANCE:.0e}{remark}")


# ---------------------------------------------------------------- the two runs


def run_in_one_process(plan, many, during):
    """Return a run in one process with the samples of all ranks, and a remark for the report."""
    run_one = partial(plan.run, nproc=1, start=str(many.folder), during=during)
    one = run_one("one", scale=plan.nproc)
    # If the script divides a batch by the number of ranks, one process needs no larger batch.
    if close(ratio(samples_in(one), samples_in(many)), plan.nproc, COUNT_TOLERANCE):
        remark = ": the script itself divides its batch by the number of ranks"
        return run_one("alone", scale=1), remark
    return one, ""


def samples_in(run, steps=1):
    """Return how many samples all ranks together have in their first steps."""
    steps_by_rank = run.by_rank(events.Step).values()
    return sum(step.sample_count for of_rank in steps_by_rank for step in of_rank[:steps])


def no_gradients_kept(run):
    """Return the reason why a run has saved no gradients to compare, or ""."""
    if (run.folder / "step1").exists():  # a file with the gradients of the first step
        return ""
    if run.returncode != 0 and len(run.steps) <= STEPS:
        return f"on {counted(run.nproc, 'rank')}, in float64: {launch.script_ends(run).text}"
    return "no model is wrapped in DistributedDataParallel and trained"


# ---------------------------------------------------------------- why they cannot be compared


def chance_in(run):
    """Return the verdict on random numbers that the observer could not make equal, or None."""
    if drawn := run.all(events.Drawn):
        text = "the data set has a generator of its own"
        if drawn[0].source != "generator":
            text = f"the collate function draws random numbers ({drawn[0].source})"
        return unseen(f"{text}, so the runs have different samples: {REMEDY}", drawn[0].where)
    if sources := run.sources_drawn:
        lines = [line.where for line in run.all(events.LineDrew) if line.source in sources]
        text = f"each step draws random numbers ({', '.join(sources)}), which differ between the "
        return unseen(f"{text}runs: {REMEDY}", next(iter(lines), ""))


def samples_differ(many, one):
    """Return why the first steps of the two runs have different samples, or ""."""
    if not (many.training_passes and one.training_passes):
        return "no DataLoader gives the samples, so the drill cannot enlarge the batch"
    of_rank = next(iter(many.passes_by_rank.values()))
    if sum(many.steps[0] in data_pass.steps for data_pass in of_rank) > 1:
        return "a step takes samples from several DataLoaders, and its loss may depend on how many"
    passes, (alone,) = [*many.training_passes[0].values()], one.training_passes[0].values()
    if any(None in [batch.indices for batch in each.batches] for each in (*passes, alone)):
        return "the samples have no index: a stream, or a loader with in_order=False"
    if any(each.dataset_checksum != alone.dataset_checksum for each in passes):
        return "the data differs from run to run, or with the number of ranks: seed it"
    counts = [samples_in(run) for run in (many, one)]
    if not close(ratio(*counts), 1, COUNT_TOLERANCE):
        text = f"the first step has {counts[0]} samples, and {counts[1]} in one process: the "
        return f"{text}script makes its batches itself, and the drill cannot enlarge them"
    if not steps_with_same_samples(many, one):
        text = "in the first step, the ranks have other samples than the one process: they do not "
        return f"{text}take turns in one order, or a single batch is the whole epoch"
    return ""


def steps_with_same_samples(many, one):
    """Return how many of the first steps have the same samples in both runs.

    The last batches of an epoch differ, because the sampler pads them.
    """
    passes, (alone,) = [*many.training_passes[0].values()], one.training_passes[0].values()
    rows = zip(*(data_pass.batches for data_pass in passes))
    batches = [list(chain(*(batch.indices for batch in row))) for row in rows]
    expected = alone.values("indices")

    def agree(end):
        seen = list(chain(*batches[:end]))
        return sorted(seen) == sorted(expected[: len(seen)])

    same = len([*takewhile(agree, range(1, len(batches) + 1))])
    samples = sum(map(len, batches[:same]))
    counts = [sum(step.sample_count for step in row) for row in many.step_rows[:STEPS]]
    steps = sum(total <= samples for total in accumulate(counts))
    return min(steps, len(one.steps), STEPS)


# ---------------------------------------------------------------- what differs


def other_rates(many, one):
    """Return the verdict on learning rates that differ between many processes and one.

    The drill multiplies the DataLoader's batch size, which the script does not see. If the script
    computes its rates from batch size times processes, those of one process are N times smaller.
    """
    for number, (of_many, of_one) in enumerate(list(zip(many.steps, one.steps))[:STEPS], 1):
        for rate, expected in zip(of_many.rates, of_one.rates):
            if close(rate, expected, 1e-6):
                continue
            text = f"in step {number}, the learning rates are {rate:.3g} and {expected:.3g}: "
            if rate > expected:
                text += "right if they are computed from batch size times number of processes"
            else:
                text += "does a schedule count the samples of one rank? It is right if the script "
                text += "shares out the steps of the schedule"
            return unsure(text, of_many.where)


def other_gradients(many, one, number):
    """Return a verdict on how, and by how much, the gradients of a step differ, or None."""
    pairs = gradient_pairs(many, one, number)
    off = {name: distance(*pair) for name, pair in pairs.items()}
    differing = [name for name in pairs if not off[name] <= TOLERANCE]
    if not differing:
        return None
    step, worst = many.steps[number - 1], max(differing, key=off.get)
    if not all(pairs[name][0].isfinite().all() for name in differing):
        return wrong(f"step {number}: the gradient of {worst} is not finite", step.where)
    hooks = [event.name for event in many.all(events.CommHook)]
    if hooks:
        return unseen(f"{hooks[0]} reduces the gradients in its own way", step.where)
    say, looks, where, page = appearance(many, number, [pairs[name] for name in differing])
    text = f"step {number}: {looks} ({len(differing)} of {counted(len(pairs), 'gradient')} differ "
    text += f"from those of one process, {worst} by {off[worst]:.1e} of its largest value)"
    return say(text + "; the steps before agree" * (number > 1), where or step.where, page)


def appearance(many, number, pairs):
    """Return a kind of verdict on differing gradients, its text, and a line and a page, if any."""
    first, size = many.first_difference("gradients"), many.nproc
    factors = [ratio((of_many * of_one).sum(), of_one.square().sum()) for of_many, of_one in pairs]
    factor = factors[0]
    is_multiple = all(
        close(each, factor, 1e-4) and distance(of_many, each * of_one) < 1e-4
        for each, (of_many, of_one) in zip(factors, pairs)
    )
    if first and first.number <= number:
        text = "each rank has the gradients of its own part"
        if lines := first.row[0].bypassed:
            text += f", because the model is called without its wrapper at {short(lines[0])}"
            return wrong, text, lines[0], "forward_through_module"
        return wrong, f"{text}: they differ from rank to rank", "", PAGE
    if is_multiple and close(factor, size, 1e-3):
        text = f"the gradients are the sum over the ranks, {size} times the mean: is a loss or a "
        return wrong, f"{text}gradient added up over the ranks?", "", PAGE
    if is_multiple and close(factor, 1 / size, 1e-3):
        text = f"the gradients are 1/{size} of the mean: is the loss a sum over the batch, or is "
        text += "it divided by the number of ranks, although DDP divides already?"
        if re.search(BY_BATCH_SIZE, many.source):
            text += " It is right to divide the sum by the batch size of one rank"
            return unsure, text, "", PAGE
        return wrong, text, "", PAGE
    if is_multiple:
        text = f"the gradients are {factor:.3g} times those of one process: does the loss count "
        return wrong, f"{text}samples or micro-batches?", "", PAGE
    if drew := [line for line in many.all(events.LineDrew) if line.source.isdigit()]:
        text = "a generator of the script draws numbers that differ between the runs: "
        return unseen, text + REMEDY, drew[0].where, PAGE
    return unsure, NO_MULTIPLE, "", PAGE


def cuts_gradients(run):
    """Return whether a collective that a loss may depend on does not pass on the gradient."""
    return any(call.cuts_gradient and call.elements > 1 for call in run.all(events.Collective))


def gradient_pairs(many, one, number):
    """Return the gradients of both runs in a step: {name: (of many processes, of one)}.

    Gradients that are nearly 0 are left out, such as that of a bias before BatchNorm.
    """
    models = (torch.load(run.folder / f"step{number}", weights_only=True) for run in (many, one))
    pairs = {
        f"{name} of model {position}" if position > 1 else name: (of_many, of_one)
        for position, (model_of_many, model_of_one) in enumerate(zip(*models), 1)
        for (name, of_many), (_, of_one) in zip(model_of_many, model_of_one)
        if of_many is not None and of_one is not None and of_one.numel()
    }
    smallest = 1e-6 * max((of_one.abs().max().item() for _, of_one in pairs.values()), default=0)
    # `<` is false for NaN, so gradients with a NaN are compared.
    return {
        name: pair
        for name, pair in pairs.items()
        if not all(value.abs().max() < smallest for value in pair)
    }
