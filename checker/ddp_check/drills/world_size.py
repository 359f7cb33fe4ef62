"""The drill that compares many processes with one that has as many times the batch."""

from functools import partial
from itertools import chain

import torch

from ddp_check import events
from ddp_check.drills.resume import act_when, count_steps
from ddp_check.keeper import signal_processes
from ddp_check.numbers import close, distance, ratio
from ddp_check.protocol import STEPS
from ddp_check.ranks import counted
from ddp_check.rules import gradients, launch, verdict_of
from ddp_check.rules.base import UNSURE, WRONG, passed, unseen, unsure, wrong

TOLERANCE = 1e-6  # of values that have to be equal
COUNT_TOLERANCE = 0.3  # of numbers of samples, as loaders fetch some ahead


def world_size(plan):
    """N processes train like one with N times the batch"""
    yield "the steps agree", steps_agree(plan)


def cannot_compare(run):
    """Return why the undisturbed run shows that the steps cannot be compared, or ""."""
    if run.returncode != 0 and len(run.steps) <= STEPS:
        return f"the script fails without the drill: {launch.script_ends(run).text}"
    if run.nproc == 1:
        return "there is one process only: run it with --nproc 2"
    if not run.all(events.Wrap):
        return "no model is wrapped in DistributedDataParallel"
    if run.goes_another_way:
        return "the ranks average their weights: one process does something else"
    return ""


def steps_agree(plan):
    """Return the verdict on the first steps of many processes and of one."""
    kill_all = partial(signal_processes, method="kill")
    after_some_steps = partial(act_when, lambda seen: count_steps(seen) > STEPS, kill_all)
    many = plan.run("many", scale=1, during=after_some_steps)
    if verdict := no_gradients_kept(many):
        return verdict
    one, remark = run_in_one_process(plan, many, after_some_steps)
    if verdict := no_gradients_kept(one):
        return verdict
    if (one.world_size, many.world_size) != (1, plan.nproc):  # it starts its ranks itself
        return unseen(f"{one.world_size} and {many.world_size} ranks, not 1 and {plan.nproc}")
    if verdict := other_samples(many, one):
        return verdict
    if many.draws_numbers:
        return unseen("random numbers are drawn while it trains, for other than dropout")
    if any(call.cuts_gradient and call.elements > 1 for call in many.all(events.Collective)):
        return unseen("both runs lack the gradient of what is gathered")
    rates_verdict = other_rates(many, one)
    # Other rates change the weights, so only the gradients of the first step can be compared.
    steps = 1 if rates_verdict else min(len(many.steps), len(one.steps), STEPS)
    # Those of the first step are the cause if later ones differ, too.
    verdict = other_gradients(many, one, 1) or other_gradients(many, one, steps) or rates_verdict
    text = f"samples, learning rates and gradients of {counted(steps, 'step')}, in float64"
    return verdict or passed(f"{text}, to within {TOLERANCE:.0e}{remark}")


def run_in_one_process(plan, many, during):
    """Return a run in one process with as many samples as all ranks have, and a remark on it."""
    run_one = partial(plan.run, nproc=1, start=str(many.folder), during=during)
    one = run_one("one", scale=plan.nproc)
    # A script that divides one batch by the number of ranks needs no larger one in one process.
    if close(ratio(samples_in(one), samples_in(many)), plan.nproc, COUNT_TOLERANCE):
        remark = ": the script itself divides its batch by the number of ranks"
        return run_one("alone", scale=1), remark
    return one, ""


def samples_in(run):
    """Return how many samples the first step of all ranks has."""
    steps_by_rank = run.by_rank(events.Step).values()
    return sum(step.sample_count for steps in steps_by_rank for step in steps[:1])


def no_gradients_kept(run):
    """Return the verdict if the run kept no gradients to compare."""
    if (run.folder / "step1").exists():  # a file with the gradients of the first step
        return None
    if run.returncode != 0 and len(run.steps) <= STEPS:
        return unseen(f"{run.nproc} processes, in float64: {launch.script_ends(run).text}")
    return unseen("no model is wrapped in DistributedDataParallel and trained")


def other_rates(many, one):
    """Return the verdict on learning rates that differ between many processes and one.

    The drill multiplies the batch of a DataLoader. A script that computes its rates from its own
    batch size times the number of processes then sees 1/N of the samples in the one process.
    """
    for number, (of_many, of_one) in enumerate(list(zip(many.steps, one.steps))[:STEPS], 1):
        for rate, expected in zip(of_many.rates, of_one.rates):
            if close(rate, expected, TOLERANCE):
                continue
            text = f"in step {number}, the learning rates are {rate:.3g} and {expected:.3g}: "
            if rate > expected:
                text += "right if they are computed from batch size times number of processes"
            else:
                text += "does a schedule count the samples of one rank? It is right if the script "
                text += "shares out the steps of the schedule"
            return unsure(text, of_many.where)


def other_samples(many, one):
    """Return the verdict if the steps do not have the same samples, or that is not seen."""
    if not (many.training_passes and one.training_passes):
        return unseen("no DataLoader was used to train")
    passes, (alone,) = many.training_passes[0].values(), one.training_passes[0].values()
    if any(data_pass.values("indices") is None for data_pass in (*passes, alone)):
        return unseen("the samples have no index")
    if any(data_pass.dataset_checksum != alone.dataset_checksum for data_pass in passes):
        return unseen("the data differs from run to run, or with the number of ranks: seed it")
    counts = [samples_in(run) for run in (many, one)]
    if not close(ratio(*counts), 1, COUNT_TOLERANCE):
        text = f"the first step has {counts[0]} samples, and {counts[1]} in one process: the "
        return unseen(f"{text}script makes its batches itself, and the drill cannot enlarge them")
    for number in range(1, 1 + min(STEPS, *(len(data_pass.batches) for data_pass in passes))):
        batches = chain(*(data_pass.batches[:number] for data_pass in passes))
        of_many = sorted(chain(*(batch.base_indices for batch in batches)))
        if of_many != sorted(alone.values("base_indices")[: len(of_many)]):
            text = f"batch {number} of the ranks has other samples than that of the one process"
            return unseen(f"{text}: they do not take turns in one order")


def other_gradients(many, one, number):
    """Return the verdict if a gradient differs in the step of this number, with the cause."""
    for name, of_many, of_one in gradient_pairs(many, one, number):
        difference = distance(of_many, of_one)
        if difference <= TOLERANCE:
            continue
        where, page = many.steps[0].where, gradients.WRONG_RESULTS
        if not of_many.isfinite().all():
            return wrong(f"step {number}: the gradient of {name} is not finite", where)
        factor = ratio(of_many.norm().item(), of_one.norm().item())
        text = f"step {number}: the gradient of {name} is off by {difference:.1e}, and "
        text += f"{factor:.2f} times as large"
        in_the_run = verdict_of(gradients.gradients_are_averaged, many)
        if in_the_run.status in (WRONG, UNSURE):
            text, where, page = f"{text}; {in_the_run.text}", in_the_run.where, in_the_run.page
        return wrong(text, where, page or gradients.WRONG_RESULTS)


def gradient_pairs(many, one, number):
    """Return the gradients of both runs in a step: (name, of many processes, of one).

    Without those that are nearly 0, as that of a bias before BatchNorm.
    """
    models = (torch.load(run.folder / f"step{number}", weights_only=True) for run in (many, one))
    pairs = [
        (name, of_many, of_one)
        for model_of_many, model_of_one in zip(*models)
        for (name, of_many), (_, of_one) in zip(model_of_many, model_of_one)
        if of_many is not None and of_one is not None and of_one.numel()
    ]
    smallest = 1e-6 * max((of_one.abs().max().item() for *_, of_one in pairs), default=0)
    # `<` is false for NaN, which has to be compared.
    return [pair for pair in pairs if not all(value.abs().max() < smallest for value in pair[1:])]
