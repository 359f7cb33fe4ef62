"""The drill that compares many processes with one that has as many times the batch."""

from functools import partial
from itertools import chain

import torch

from ddp_check import events
from ddp_check.drills.resume import once
from ddp_check.drills.steps import count_steps, draws_numbers, steps_of
from ddp_check.numbers import close, distance, ratio
from ddp_check.plan import kill_all
from ddp_check.protocol import STEPS
from ddp_check.ranks import counted, short
from ddp_check.rules import gradients, launch, verdict_of
from ddp_check.rules.base import passed, unseen, unsure, wrong
from ddp_check.source import shares_of_ranks

TOLERANCE, ABOUT = 1e-6, 1e-2  # of equal values, and of a factor


def world_size(plan):
    """N processes train like one with N times the batch"""
    yield "the steps agree", cannot_compare(plan) or agree(plan)


def cannot_compare(plan):
    """Return the verdict if the undisturbed run shows that the steps cannot be compared."""
    run = plan.undisturbed
    if run.returncode != 0 and len(steps_of(run)) <= STEPS:
        return unseen(f"the script fails without the drill: {launch.script_ends(run).text}")
    if not run.all(events.Wrap):
        return unseen("no model is wrapped in DistributedDataParallel")
    if run.averages_weights:
        return unseen("the ranks average their weights: one process does something else")
    changed = [name for step in run.all(events.Step) for name in step.buffers_changed]
    if changed:
        text = f"{changed[0]} changes in training, as BatchNorm's statistics do, and each process "
        return unseen(f"{text}has its own: run the drill with SyncBatchNorm, or another norm")
    if draws_numbers(run):
        text = "random numbers are drawn while it trains, and one process draws others: run the "
        return unseen(f"{text}drill without dropout and noise")


def agree(plan):
    """Return the verdict on the first steps of many processes and of one."""
    after_some = partial(once, lambda found: count_steps(found) > STEPS, kill_all)
    many = plan.run("many", scale=1, during=after_some)
    if verdict := nothing_kept(many):
        return verdict
    start, same_batch = str(many.folder), ""
    one = plan.run("one", nproc=1, scale=plan.nproc, start=start, during=after_some)
    if close(ratio(samples_in(one), samples_in(many)), plan.nproc, 0.3):  # some are fetched ahead
        one = plan.run("alone", nproc=1, scale=1, start=start, during=after_some)
        same_batch = ": the script itself divides its batch by the number of ranks"
    if verdict := nothing_kept(one):
        return verdict
    sizes = one.world_size, many.world_size
    if sizes != (1, plan.nproc):
        return unseen(f"{sizes[0]} and {sizes[1]} ranks, not 1 and {plan.nproc}")
    rates = other_rates(many, one)
    if rates and rates.status != "unsure":
        return rates
    if verdict := other_samples(many, one):
        return verdict
    if many.all(events.GradientLost):
        return unseen("both runs lack the gradient of what is gathered")
    steps = 1 if rates else min(len(steps_of(many)), len(steps_of(one)), STEPS)
    apart = first_apart(many, one, 1) or first_apart(many, one, steps)
    if apart:
        return why_apart(many, one, *apart)
    text = f"samples, learning rates and gradients of {counted(steps, 'step')}, in float64"
    return rates or passed(f"{text}, to within {TOLERANCE:.0e}{same_batch}")


def samples_in(run):
    """Return how many samples the first step of all ranks has."""
    rows = run.by_rank(events.Step).values()
    return sum(step.sample_count for of_rank in rows for step in of_rank[:1])


def nothing_kept(run):
    """Return the verdict if the run kept no model to compare."""
    if (run.folder / "step1").exists():
        return None
    if run.returncode != 0 and len(steps_of(run)) <= STEPS:
        return unseen(f"{run.nproc} processes, in float64: {launch.script_ends(run).text}")
    return unseen("no model is wrapped in DistributedDataParallel and trained")


def other_rates(many, one):
    """Return the verdict on learning rates that differ between many processes and one.

    The drill multiplies the batch of a DataLoader. A script that computes its rates from its own
    batch size times the number of processes then sees 1/N of the samples in the one process.
    """
    for number, pair in enumerate(list(zip(steps_of(many), steps_of(one)))[:STEPS], 1):
        of_many, of_one = pair
        for rate, expected in zip(of_many.rates, of_one.rates):
            if close(rate, expected, TOLERANCE):
                continue
            text = f"in step {number}, the learning rates are {rate:.3g} and {expected:.3g}"
            if rate > expected:
                text += ": right if they are computed from batch size times number of processes, "
                return unsure(f"{text}which the drill cannot change in the script", of_many.where)
            if lines := shares_of_ranks(many):
                text += f": right if {short(lines[0])}, which divides by the number of processes, "
                return unsure(f"{text}shares out the steps of the schedule", of_many.where)
            text += ": does a schedule count the samples of one rank?"
            return wrong(text, of_many.where)


def other_samples(many, one):
    """Return the verdict if the steps do not have the same samples, or that is not seen."""
    pair = [list(run.epochs[0].values()) for run in (many, one) if run.epochs]
    if len(pair) < 2 or any(entry.values("indices") is None for ranks in pair for entry in ranks):
        return unseen("no DataLoader was used to train, or its samples have no index")
    if pair[0][0].dataset_checksum != pair[1][0].dataset_checksum:
        return unseen("the data differs from run to run, or with the number of ranks: seed it")
    counts = [samples_in(run) for run in (many, one)]
    if not close(ratio(*counts), 1, 0.3):
        text = f"the first step has {counts[0]} samples, and {counts[1]} in one process: the "
        return unseen(f"{text}script makes its batches itself, and the drill cannot enlarge them")
    ranks, (alone,) = pair
    for number in range(1, 1 + min(STEPS, *(len(entry.batches) for entry in ranks))):
        batches = chain(*(entry.batches[:number] for entry in ranks))
        of_many = sorted(chain(*(batch.base_indices for batch in batches)))
        if of_many != sorted(alone.values("base_indices")[: len(of_many)]):
            text = f"batch {number} of the ranks has other samples than the one process: the ranks "
            return unseen(f"{text}do not take turns in one order of the data")


def first_apart(many, one, step):
    """Return the first gradient that differs in a step, or None.

    It is (step, name, how far apart, the gradient of many processes, that of one).
    """
    models = (torch.load(run.folder / f"step{step}", weights_only=True) for run in (many, one))
    rows = [row for both in zip(*models) for row in zip(*both)]
    pairs = [(name, of_many, of_one) for (name, of_many), (_, of_one) in rows]
    pairs = [pair for pair in pairs if pair[1] is not None and pair[2] is not None]
    # Before BatchNorm, a bias has a gradient of about 0.
    least = 1e-6 * max((of_one.abs().max().item() for *_, of_one in pairs), default=0)
    for name, of_many, of_one in pairs:
        largest = max(of_many.abs().max(), of_one.abs().max())
        apart = distance(of_many, of_one)
        if apart > TOLERANCE and not largest < least:  # which is false for NaN as well
            return step, name, apart, of_many, of_one
    return None


def why_apart(many, one, step, name, apart, of_many, of_one):
    """Return the verdict on a gradient that differs, with its cause."""
    if not of_many.isfinite().all():
        return wrong(f"step {step}: the gradient of {name} is not finite", steps_of(many)[0].where)
    verdict = verdict_of(gradients.gradients_are_averaged, many)
    factor, ranks = ratio(of_many.norm().item(), of_one.norm().item()), many.world_size
    text = f"step {step}: the gradient of {name} is off by {apart:.1e}"
    for expected, cause in (
        (ranks, "the script adds up what DDP has averaged"),
        (1 / ranks, "the script divides it again"),
    ):
        if close(factor, expected, ABOUT):
            text += f"; it is {factor:.2f} times as large: DDP takes the mean over the ranks, and "
            return wrong(text + cause, verdict.where, verdict.page or gradients.WRONG_RESULTS)
    if reason := weighted_otherwise(many, one, step):
        return wrong(f"{text}; {reason}", verdict.where, gradients.WRONG_RESULTS)
    return wrong(text, verdict.where, verdict.page or gradients.WRONG_RESULTS)


def weighted_otherwise(many, one, step):
    """Return why the loss of one process is not the mean of the ranks' losses, or ""."""
    rows = list(zip(*many.by_rank(events.Step).values()))
    losses = [taken.losses[-1] for taken in rows[step - 1] if taken.losses]
    of_one = steps_of(one)[step - 1].losses
    if len(losses) < 2 or not of_one:
        return ""
    mean = sum(losses) / len(losses)
    if close(of_one[-1], mean, 1e-5) or not min(losses) < of_one[-1] < max(losses):
        return ""
    text = f"the loss of one process, {of_one[-1]:.4g}, is not the mean of the ranks' losses, "
    text += f"{mean:.4g}: is it a mean over tokens, or over what a mask leaves, of which each rank "
    return f"{text}has another number?"
