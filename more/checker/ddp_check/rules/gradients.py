"""Rules about losses, gradients and learning rates."""

import math

from ddp_check import events
from ddp_check.numbers import close
from ddp_check.ranks import counted, differing_ranks, short
from ddp_check.rules.base import not_applicable, passed, slow, unseen, unsure, wrong

NOT_FINITE = unseen("they are not finite: equal ones prove nothing")
PAGE = "lookup/wrong_results"  # the page about wrong results without an error


def values_are_finite(run):
    """losses, gradients and weights are finite"""
    if first := run.first_infinite:
        steps = {rank: step for rank, step in zip(run.events_by_rank, first.row) if step.infinite}
        # An infinite loss is the cause of infinite gradients.
        rank, step = min(steps.items(), key=lambda item: item[1].infinite != "loss")
        text = f"from step {first.number} on; on rank {rank}, the {step.infinite} is not finite"
        return wrong(text, step.where)


def gradients_are_averaged(run):
    """all ranks take each step with the same gradients"""
    if run.is_sharded:
        return not_applicable("the gradients are sharded")
    if run.has_own_exchange and run.first_difference("gradients"):
        return not_applicable("the ranks exchange something else than gradients")
    if any(step.closure for step in run.all(events.Step)):
        return unseen("a closure computes the gradients")
    # These faults can be seen even if some gradients are infinite:
    verdict = all_zero(run) or unequal_step_counts(run) or gradients_differ(run)
    if verdict := verdict or never_zeroed(run) or other_parameters(run):
        return verdict
    if run.first_infinite:
        return NOT_FINITE
    return several_reductions(run) or no_fault_in_gradients(run)


def all_zero(run):
    """Return the verdict on an optimizer whose gradients are zero, or missing, in all its steps.

    Zero gradients in some steps are no fault: a hinge loss has them if all samples are right.
    """
    rows_by_optimizer = {}  # names of an optimizer's parameters -> rows of this optimizer's steps
    for row in run.step_rows:
        rows_by_optimizer.setdefault(tuple(row[0].gradients), []).append(row)
    for rows in rows_by_optimizer.values():
        if all(step.zero for row in rows for step in row):
            text = f"all gradients are zero, in {counted(len(rows), 'step')}: does zero_grad() "
            text += "come after backward(), or has the optimizer other parameters than the model?"
            # One of several optimizers may not have trained yet, such as a GAN's discriminator.
            say = wrong if len(rows_by_optimizer) == 1 else unsure
            return say(text, rows[0][0].where, "optimizer_of_other_parameters")


def never_zeroed(run):
    """Return the verdict on steps that also use the gradients of all previous steps."""
    steps = run.steps[1:]
    if steps and all(step.stale for step in steps):
        text = "each step takes the gradients of those before it: zero_grad() is never called"
        return wrong(text, steps[0].where, PAGE)


def other_parameters(run):
    """Return the verdict on an optimizer whose parameters are not those of the wrapped model."""
    steps, wraps = run.steps, run.of_lowest_rank(events.Wrap)
    names = {name for step in steps for name in step.gradients}
    # The observer gives such a name to a parameter of an optimizer that is in no wrapped model.
    outside = [name for name in sorted(names) if name.startswith(events.PARAMETER)]
    trained = any(step.gradients.get(name) for step in steps for name in outside)
    missing = [name for name in wraps[0].names if name not in names] if len(wraps) == 1 else []
    if outside and missing and not trained:
        text = f"the optimizer has {counted(len(outside), 'parameter')} of a model that is not "
        text += f"wrapped, and has not {missing[0]}, which therefore never changes"
        return wrong(text, steps[0].where, "optimizer_of_other_parameters")


def unequal_step_counts(run):
    """Return the verdict on ranks that do not take equally many steps."""
    if run.returncode != 0 or run.in_join:
        return None
    counts = {rank: len(steps) for rank, steps in run.by_rank(events.Step).items()}
    if pair := differing_ranks(counts):
        text = " and ".join(f"{counted(counts[rank], 'step')} on rank {rank}" for rank in pair)
        text = f"the optimizer takes {text}: does each rank decide by itself when to take one?"
        where, wrapped = run.all(events.Step)[0].where, run.all(events.Wrap)
        # If no model is wrapped, that is the cause, and weights_agree reports it.
        return wrong(text, where, "uneven_batches", follows=not wrapped)


def gradients_differ(run):
    """Return the verdict on gradients that differ from rank to rank, with the first cause found."""
    first = run.first_difference("gradients")
    if not first:
        return None
    step, name = first.row[0], first.name
    text = f"step {first.number}: the gradients differ from rank to rank, first that of {name}"
    if step.bypassed:
        text += f"; the model is called without its wrapper at {short(step.bypassed[0])}"
        return wrong(text, step.bypassed[0], "forward_through_module")
    if not step.synced:
        text += "; the last backward() was under no_sync"
        return wrong(text, step.where, "accumulation_without_no_sync")
    if not run.all(events.Wrap):  # that is the cause, and weights_agree reports it
        return wrong(text, step.where, follows=True)
    outside = ", which is in no wrapped model" * name.startswith(events.PARAMETER)
    return wrong(text + outside, step.where)


def lowest_and_highest(values, layout):
    """Return the lowest and the highest of these values in words."""
    return f"{min(values):{layout}} to {max(values):{layout}}"


def several_reductions(run):
    """Return the verdict on steps whose gradients are all-reduced more than once.

    For example, a GAN's discriminator has two backward passes; the first could be in no_sync().
    """
    for number, step in enumerate(run.of_lowest_rank(events.Step), 1):
        if step.reductions > 1:
            text = f"step {number}: {step.reductions} backward passes all-reduce their gradients"
            return slow(text, step.where, "accumulation_without_no_sync")


def no_fault_in_gradients(run):
    """Return the verdict that the gradients are equal, unless some could not be compared."""
    if run.in_join:
        return unseen("inside of join(), the steps of a rank that ran out have no counterpart")
    if not run.all(events.Wrap):
        return unseen("they are equal on all ranks, and may be the mean or the sum")
    text = counted(len(run.of_lowest_rank(events.Step)), "step")
    return passed(text, run.all(events.Step)[0].where)


def gradients_pass_collectives(run):
    """the loss keeps its gradient where it depends on what other ranks gave"""
    calls = [call for call in run.all(events.Collective) if call.requires_gradient]
    for call in calls:
        if call.cuts_gradient and call.elements > 1:  # one number is a loss to print
            text = f"{call.name} returns no gradient; that of torch.distributed.nn does"
            return unsure(text, call.where, "recipes/contrastive")
    if not calls:
        return unseen("no collective gets a tensor that requires a gradient")


def clipping_comes_last(run):
    """gradients are clipped when no GradScaler's factor is in them"""
    for event in run.all(events.Clipped):
        if event.scaled:
            text = "the factor is still in them: call scaler.unscale_(optimizer) first"
            return wrong(text, event.where, "recipes/fp16_scaler")


def rates_are_equal(run):
    """all ranks have the same learning rate"""
    if row := differing_metrics(run):
        values = lowest_and_highest([event.metric for event in row], ".4g")
        text = f"the scheduler gets another value on each rank, {values}, so the ranks lower their "
        return wrong(f"{text}learning rates in different steps", row[0].where, PAGE)
    if first := run.first_difference("rates"):
        group = first.name  # index of a group of parameters, which a rank may lack
        rates = [step.rates[group] for step in first.row if group < len(step.rates)]
        text = f"from step {first.number} on, they differ from rank to rank: "
        say = unsure if run.has_own_exchange else wrong
        return say(text + lowest_and_highest(rates, ".3g"), first.row[0].where, PAGE)


def differing_metrics(run):
    """Return the first step of ReduceLROnPlateau whose metric differs between ranks, or None."""
    for row in run.rows(events.Scheduled):
        metrics = [event.metric for event in row]
        finite = None not in metrics and all(map(math.isfinite, metrics))
        if finite and not all(close(value, metrics[0], 1e-4) for value in metrics):
            return row
