"""Rules about losses, gradients and learning rates."""

from collections import Counter

from ddp_check import events
from ddp_check.numbers import close, ratio
from ddp_check.ranks import counted, differing_ranks, short
from ddp_check.rules.base import not_applicable, passed, slow, unseen, unsure, wrong
from ddp_check.source import divisions_by_world_size

NO_KERNEL = "an autograd kernel was not registered"  # PyTorch's warning
NOT_FINITE = unseen("they are not finite: equal ones prove nothing")
WRONG_RESULTS = "lookup/wrong_results"  # the page about wrong results without an error
UNEQUAL = 1.05  # times as many elements on one rank as on another: fewer are as good as equal
FACTOR = 1e-3  # to which a factor between gradients is known: they are sums of float32


def values_are_finite(run):
    """losses, gradients and weights are finite"""
    if first := run.first_infinite:
        steps = {rank: step for rank, step in zip(run.events_by_rank, first.row) if step.infinite}
        # The loss is the cause of what is infinite behind it.
        rank = min(steps, key=lambda rank: steps[rank].infinite != "loss")
        text = f"from step {first.number} on; the first rank whose {steps[rank].infinite} is not "
        return wrong(f"{text}finite is {rank}", steps[rank].where)
    if any(not event.finite for event in run.all(events.Final)):
        return wrong("the final weights are not finite", run.all(events.Step)[-1].where)


def gradients_are_averaged(run):
    """each step takes the mean gradient of all ranks"""
    if run.is_sharded:
        return not_applicable("the gradients are sharded")
    if any(step.closure for step in run.all(events.Step)):
        return unseen("a closure computes the gradients")
    if run.averages_weights:
        return not_applicable("the ranks average their weights instead")
    if verdict := all_zero(run) or steps_left_out(run) or reduced_apart(run):
        return verdict
    if run.first_infinite:
        return NOT_FINITE
    for judge in (reduced_in_vain, scaled_otherwise, loss_divided, mean_of_unequal, often_reduced):
        if verdict := judge(run):
            return verdict
    if run.in_join:
        return unseen("inside of join(), the steps of a rank that ran out have no counterpart")
    return passed_as_averaged(run)


def all_zero(run):
    """Return the verdict on a step without any gradient."""
    for number, row in enumerate(run.step_rows, 1):
        if all(step.zero for step in row):
            text = f"step {number}: all gradients are zero"
            return wrong(text, row[0].where, follows=bool(row[0].foreign))


def steps_left_out(run):
    """Return the verdict on ranks that do not take equally many steps."""
    if counts := uneven_steps(run, events.Step):
        text = f"the optimizer takes {counts}: does each rank decide by itself when to take one?"
        where, wrapped = run.all(events.Step)[0].where, run.all(events.Wrap)
        return wrong(text, where, "uneven_batches", follows=not wrapped)


def often_reduced(run):
    """Return the verdict on steps whose gradients are all-reduced more than once."""
    for number, step in enumerate(run.of_lowest_rank(events.Step), 1):
        if step.reductions > 1:
            text = f"step {number}: {step.reductions} backward passes all-reduce their gradients"
            text += "; under no_sync(), only the last of them would"
            return slow(text, step.where, "accumulation_without_no_sync")


def uneven_steps(run, kind):
    """Return how many steps of this kind two ranks take, in words, or "" if all take as many."""
    if run.returncode != 0 or run.in_join:
        return ""
    counts = {rank: len(found) for rank, found in run.by_rank(kind).items()}
    pair = differing_ranks(counts) or ()
    return " and ".join(f"{counted(counts[rank], 'step')} on rank {rank}" for rank in pair)


def line_of_reduction(run):
    """Return the line in which the script most often adds up tensors over the ranks, or ""."""
    lines = Counter(
        call.where for call in run.all(events.Collective) if call.sums and call.elements > 1
    )
    return max(lines, key=lines.get) if lines else ""


def reduced_apart(run):
    """Return the verdict on gradients that differ from rank to rank."""
    first = run.first_difference("gradients")
    if not first:
        return None
    step = first.row[0]
    text = (
        f"step {first.number}: the gradients differ from rank to rank, first that of {first.name}"
    )
    for where in step.bypassed:
        text += f"; the model is called without its wrapper at {short(where)}"
        return wrong(text, where, "forward_through_module")
    if not step.synced:
        text += "; the last backward() was under no_sync"
        return wrong(text, step.where, "accumulation_without_no_sync")
    if first.name in step.unwatched:
        text += ", which DDP does not reduce: it had no gradient, or was not there, when the model "
        return wrong(f"{text}was wrapped", run.of_lowest_rank(events.Wrap)[-1].where)
    by_hand = step.reduced and line_of_reduction(run)
    # A parameter of no wrapped model, or no wrapped model at all, is the cause: another rule's.
    unwrapped = step.foreign and str(first.name).startswith(events.PARAMETER)
    follows = bool(unwrapped or not (run.all(events.Wrap) or by_hand))
    return wrong(text, by_hand or step.where, follows=follows)


def reduced_in_vain(run):
    """Return the verdict if the ranks reduce by hand gradients that are equal on all of them."""
    rows = [row for row in run.step_rows if all(step.reduced_all for step in row)]
    equal = [row for row in rows if all(step.reduced == row[0].reduced for step in row)]
    # In some steps, more than gradients is reduced, such as losses.
    if run.world_size < 2 or len(equal) < 2 or len(equal) <= len(rows) / 2:
        return None
    step, text = equal[0][0], "before they are all-reduced, all ranks have the same"
    if step.zero:
        return None
    if not run.all(events.Wrap):
        return wrong(f"{text}: the same data everywhere?", step.where, "no_sampler")
    where, factor = line_of_reduction(run), factor_of_mean(run)
    are_gradients = where and len(step.reduced) >= len(step.gradients)
    if are_gradients and factor is not None and close(factor, 1, FACTOR):
        return slow(f"{text}: DDP has averaged them, and this changes nothing", where)


def factor_of_mean(run):
    """Return how many times the mean gradient of all ranks each step takes, or None if unknown."""
    factors = []
    for row in run.step_rows:
        own = [step.own_gradient for step in row]
        if None in own or row[0].taken_gradient is None:
            continue
        factors.append(ratio(row[0].taken_gradient, sum(own) / len(own)))
    if factors and all(close(factor, factors[0], FACTOR) for factor in factors):
        return factors[0]


def scaled_otherwise(run):
    """Return the verdict on gradients that are a sum, or divided twice, instead of a mean."""
    factor, ranks = factor_of_mean(run), run.world_size
    if factor is None or ranks < 2:
        return None
    where = line_of_reduction(run) or run.all(events.Step)[0].where
    wrapped = run.all(events.Wrap)
    if close(factor, ranks, FACTOR) and (wrapped or not loss_is_a_part(run)):
        text = f"the gradients are the sum over the ranks, {ranks} times their mean: "
        text += "DDP has averaged them before" if wrapped else f"divide them by {ranks}"
        return wrong(text, where, WRONG_RESULTS)
    if close(factor, 1 / ranks, FACTOR):
        text = f"the gradients are 1/{ranks} of the mean over the ranks: "
        text += "DDP has divided them already" if wrapped else "they are divided twice"
        return wrong(text, where, WRONG_RESULTS)


def loss_is_a_part(run):
    """Return whether a rank's loss may be its part of the mean over the samples of all ranks.

    The sum of the gradients is then right. Such a loss is divided by the number of ranks, or by a
    number that the ranks add up in each step, such as that of all tokens.
    """
    steps, ranks = run.all(events.Step), run.world_size
    divided = all(any(close(by, ranks) for by in step.divisors) for step in steps)
    counts = [call for call in run.all(events.Collective) if call.sums and call.elements <= ranks]
    return divided or len(counts) >= len(steps)


def loss_divided(run):
    """Return the verdict on a loss that is divided by the world size before backward()."""
    ranks, steps = run.world_size, run.all(events.Step)
    if ranks < 2 or not run.all(events.Wrap) or run.all(events.CommHook):
        return None
    if all(step.loss_reduced for step in steps):
        if not any(close(divisor, ranks) for step in steps for divisor in step.divisors):
            text = "the loss is added up over the ranks before backward(), which adds up the "
            text += f"gradients, too: each step takes {ranks} times their mean"
            return wrong(text, steps[0].where, WRONG_RESULTS)
        return None
    lines = divisions_by_world_size(run)
    divided = all(
        step.divisors and step.backwards == 1 and all(close(by, ranks) for by in step.divisors)
        for step in steps
    )
    if lines and divided:
        text = "the loss is divided by the number of ranks before backward(), and DDP divides the "
        text += f"gradients again: each step takes 1/{ranks} of their mean"
        return wrong(text, lines[0], WRONG_RESULTS)


def mean_of_unequal(run):
    """Return the verdict on losses that are means over another number of elements on each rank."""
    uneven = []  # (step, the numbers of the ranks)
    for row in run.step_rows:
        for counts in zip(*map(elements_of_means, row)):
            if max(counts) > min(counts) * UNEQUAL:
                uneven.append((row[0], counts))
                break
    if not run.all(events.Wrap) or len(uneven) <= len(run.step_rows) / 2:
        return None
    step, counts = uneven[0]
    numbers = " and ".join(f"{count:.0f}" for count in counts[:2])
    has_terms = len(step.means_over) > len(step.losses)  # of which some may only regularize
    what, verdict = ("a term of the loss", unsure) if has_terms else ("the loss", wrong)
    text = f"{what} of each rank is a mean over another number of elements, first {numbers}, and "
    text += "DDP takes the mean of these means: divide the sum by the number on all ranks, and "
    return verdict(f"{text}multiply it by that of the ranks", step.where, WRONG_RESULTS)


def elements_of_means(step):
    """Return over how many elements the losses of a step are means: also by a division."""
    return step.means_over + [by for by in step.divisors if by > 1 and by % 1 == 0]


def passed_as_averaged(run):
    """Return the verdict on gradients in which no fault was seen."""
    steps, text = run.of_lowest_rank(events.Step), ""
    known = factor_of_mean(run)
    if not run.all(events.Wrap) and (known is None or not close(known, 1, FACTOR)):
        text = ", equal on all ranks: whether the mean or the sum, is not seen"
    return passed(counted(len(steps), "step") + text, run.all(events.Step)[0].where)


def gradients_pass_collectives(run):
    """the loss keeps its gradient where it depends on what other ranks gave"""
    lost = run.all(events.GradientLost)
    if own := [event.where for event in lost if event.own_part]:
        text = "backward() ends at what all_gather returned; the all_gather of "
        return wrong(
            f"{text}torch.distributed.nn passes gradients on", own[0], "recipes/contrastive"
        )
    if lost:
        text = "this rank's own part keeps its gradient, those of others lose it: is that intended?"
        return unsure(text, lost[0].where)
    calls = [
        call for call in run.all(events.Collective) if call.cuts_gradient and call.elements > 1
    ]
    sums = [event for event in run.all(events.ReducedInPlace) if event.elements > 1]
    if sums:
        ranks = run.world_size
        text = "backward() takes this sum for the rank's own part. If all ranks compute the same "
        text += f"loss from it, the gradient is 1/{ranks} of the right one; else it is wrong. "
        return unsure(f"{text}torch.distributed.nn.all_reduce has a gradient", sums[0].where)
    if calls and NO_KERNEL in run.output:  # said only of a call that is not explained above
        return wrong(f'{calls[0].name} has no gradient: "{NO_KERNEL} …"', calls[0].where)
    for call in calls:
        if call.name.startswith("all_gather_"):  # into one tensor
            return unsure("it has no gradient: does a loss depend on what it returns?", call.where)
    names = {call.name for call in run.all(events.Collective)}
    if not any("gather" in name or "reduce" in name for name in names):
        return unseen("the script itself gathers nothing, and adds nothing up")


def clipping_sees_gradients(run):
    """gradients are clipped when no scale is in them"""
    for event in run.all(events.Clipped):
        if event.scaled:
            text = "the GradScaler's factor is still in them: call scaler.unscale_(optimizer) first"
            return wrong(text, event.where, "recipes/fp16_scaler")


def rates_are_equal(run):
    """all ranks have the same learning rate"""
    scheduled, counts = run.all(events.Scheduled), uneven_steps(run, events.Scheduled)
    if first := run.first_difference("rates"):
        rates = " and ".join(f"{step.rates[first.name]:.3g}" for step in first.row[:2])
        text = f"from step {first.number} on, they differ from rank to rank: {rates}"
        if metrics := differing_metrics(run):
            text += f"; the scheduler gets another value on each rank, {metrics[1]}"
        elif counts:
            text += f"; the scheduler takes {counts}"
        before = [event for event in scheduled if event.time < first.row[0].time]
        cause = max(before, key=lambda event: event.time, default=first.row[0])
        return wrong(text, cause.where, WRONG_RESULTS)
    if metrics := differing_metrics(run):
        text = f"the scheduler gets another value on each rank, {metrics[1]}: sooner or later, the "
        text += "ranks will lower their learning rates at other times"
        return wrong(text, metrics[0].where, WRONG_RESULTS)
    if counts:
        text = f"the scheduler takes {counts}: should all ranks step it?"
        return unsure(text, scheduled[0].where)
    ranks, steps = run.world_size, run.of_lowest_rank(events.Step)
    taken = Counter(event.scheduler for event in run.of_lowest_rank(events.Scheduled))
    most = max(taken.values(), default=0)
    if ranks > 1 and most >= ranks * len(steps) > 0:
        text = f"the scheduler takes {most} steps, the optimizer {len(steps)}: is that meant?"
        return unsure(text, scheduled[0].where)


def differing_metrics(run):
    """Return the first step of a plateau scheduler that gets another value on each rank, or None.

    It is the step of the lowest rank, and the values in words.
    """
    for row in zip(*run.by_rank(events.Scheduled).values()):
        values = [event.metric for event in row]
        if None not in values and not all(close(value, values[0]) for value in values):
            return row[0], " and ".join(f"{value:.4g}" for value in values[:2])
    return None
