"""Rules about losses, gradients and learning rates."""

import math
from collections import Counter

from ddp_check import events
from ddp_check.numbers import close, ratio
from ddp_check.ranks import counted, differing_ranks, grouped, short
from ddp_check.rules.base import not_applicable, passed, slow, unseen, unsure, wrong
from ddp_check.source import divisions_by_world_size

NOT_FINITE = unseen("they are not finite: equal ones prove nothing")
OWN_PARAMETERS = not_applicable("each rank trains parameters of its own")
WRONG_RESULTS = "lookup/wrong_results"  # the page about wrong results without an error
UNEQUAL = 1.05  # times as many elements on one rank as on another: fewer are as good as equal
ENOUGH_STEPS = 8  # a schedule of fewer may be longer by chance
FACTOR_TOLERANCE = 1e-2  # of a factor between gradients, which may be sums of float16


def values_are_finite(run):
    """losses, gradients and weights are finite"""
    if first := run.first_infinite:
        steps = {rank: step for rank, step in zip(run.events_by_rank, first.row) if step.infinite}
        # The loss is the cause of what is infinite behind it.
        rank, step = min(steps.items(), key=lambda item: item[1].infinite != "loss")
        text = f"from step {first.number} on; on rank {rank}, the {step.infinite} is not finite"
        if scalers_disagree(run):
            text = f"each GradScaler skips other steps: reduce before unscale_(); {text}"
            return wrong(text, step.where, "recipes/fp16_scaler")
        return wrong(text, step.where)
    if any(not event.finite for event in run.all(events.Final)):
        return wrong("the final weights are not finite", run.all(events.Step)[-1].where)
    for step in run.all(events.Step):
        if not all(map(math.isfinite, step.losses)):
            text = "a loss is not finite, and no gradient that a step takes: does the script clean "
            return unsure(f"{text}them?", step.where)


def scalers_disagree(run):
    """Return whether a rank skips a step that another takes, as each unscales its own gradients."""
    taken_or_skipped = run.by_rank(events.Step, events.SkippedStep)
    kinds = {rank: [*map(type, of_rank)] for rank, of_rank in taken_or_skipped.items()}
    return differing_ranks(kinds) is not None


def gradients_are_averaged(run):
    """each step takes the mean gradient of all ranks"""
    if run.is_sharded:
        return not_applicable("the gradients are sharded")
    if any(step.closure for step in run.all(events.Step)):
        return unseen("a closure computes the gradients")
    if run.only_trainer is not None:
        return not_applicable("only one rank trains")
    if run.averages_weights:
        return not_applicable("the ranks average their weights instead")
    if run.trains_own_parameters:
        return OWN_PARAMETERS
    # Infinite numbers do not hide these three:
    if verdict := all_zero(run) or unequal_step_counts(run) or gradients_differ(run):
        return verdict
    if run.first_infinite:
        return NOT_FINITE
    return (
        gradients_of_earlier_steps(run)
        or equal_before_reduction(run)
        or sum_or_divided_twice(run)
        or loss_is_scaled(run)
        or mean_over_unequal_numbers(run)
        or several_reductions(run)
        or no_fault_in_gradients(run)
    )


def all_zero(run):
    """Return the verdict on an optimizer whose gradients are zero, or missing, in all its steps.

    In some steps they may be, such as those of a hinge loss where all samples are right.
    """
    rows_by_optimizer = {}  # the names of its parameters -> its steps
    for row in run.step_rows:
        rows_by_optimizer.setdefault(tuple(row[0].gradients), []).append(row)
    for rows in rows_by_optimizer.values():
        if all(step.zero for row in rows for step in row):
            step, text = rows[0][0], f"all gradients are zero, in {counted(len(rows), 'step')}"
            text += ": does zero_grad() come after backward(), or was the optimizer given other "
            text += "parameters than the model's, as before fully_shard()?"
            # Of several optimizers, one may wait for its turn, as a GAN's discriminator may.
            verdict = wrong if len(rows_by_optimizer) == 1 else unsure
            # If they are in no wrapped model, a rule about weights tells the cause.
            return verdict(text, step.where, follows=bool(step.unwrapped))


def unequal_step_counts(run):
    """Return the verdict on ranks that do not take equally many steps."""
    if counts := counts_that_differ(run, events.Step):
        text = f"the optimizer takes {counts}: does each rank decide by itself when to take one?"
        where, wrapped = run.all(events.Step)[0].where, run.all(events.Wrap)
        # If no model is wrapped, that is the cause, which weights_agree tells.
        return wrong(text, where, "uneven_batches", follows=not wrapped)


def counts_that_differ(run, kind):
    """Return how many steps of this kind two ranks take, in words, or "" if all take as many."""
    if run.returncode != 0 or run.in_join:
        return ""
    counts = {rank: len(steps) for rank, steps in run.by_rank(kind).items()}
    pair = differing_ranks(counts) or ()
    return " and ".join(f"{counted(counts[rank], 'step')} on rank {rank}" for rank in pair)


def gradients_differ(run):
    """Return the verdict on gradients that differ from rank to rank, with the first cause seen."""
    first = run.first_difference("gradients")
    if not first:
        return None
    step, name, wrapped = first.row[0], first.name, run.all(events.Wrap)
    in_no_model = name.startswith(events.PARAMETER)
    reduction_line = line_of_reduction(run) if step.reduced else ""  # the script's own
    text = f"step {first.number}: the gradients differ from rank to rank, first that of {name}"
    if step.bypassed:
        text += f"; the model is called without its wrapper at {short(step.bypassed[0])}"
        return wrong(text, step.bypassed[0], "forward_through_module")
    for wrap in run.of_lowest_rank(events.Wrap):
        if wrap.ranks < run.world_size:
            text += f"; DDP averages over a process group of {counted(wrap.ranks, 'rank')}"
            return wrong(text, wrap.where)
    if not step.synced:  # on the lowest rank
        text += "; the last backward() was under no_sync"
        return wrong(text, step.where, "accumulation_without_no_sync")
    if name in step.unreduced:
        text += ", which DDP does not reduce: it was frozen or not there when DDP wrapped them"
        return wrong(text, run.of_lowest_rank(events.Wrap)[-1].where)
    if not in_no_model and not run.all(events.CommHook):  # such a hook may be why
        if step.backwards:
            text += "; were they changed after DDP had averaged them?"
        else:
            text += "; no backward() has given them: torch.autograd.grad() goes past DDP"
    if not wrapped and reduction_line and step.reduced_all:
        text += "; the optimizer does not take what is added up: is it written back to .grad?"
    # Another rule tells of parameters in no wrapped model, and if nothing is wrapped or reduced.
    told_elsewhere = (step.unwrapped and in_no_model) or not (wrapped or reduction_line)
    return wrong(text, reduction_line or step.where, follows=bool(told_elsewhere))


def line_of_reduction(run):
    """Return the line in which the script most often adds up tensors over the ranks, or ""."""
    calls = [call for call in run.all(events.Collective) if call.sums and call.elements > 1]
    lines = Counter(call.where for call in calls)
    return max(lines, key=lines.get) if lines else ""


def equal_before_reduction(run):
    """Return the verdict if the ranks reduce by hand gradients that are equal on all of them.

    Without DDP, they come from the same data: wrong. With it, DDP has averaged them before: slow.
    At least two steps, and more than half of them, have to be so, for in some a script may reduce
    other things, such as losses. Steps whose gradients are all zero do not count.
    """
    rows = [row for row in run.step_rows if all(step.reduced_all for step in row)]
    rows = [row for row in rows if not row[0].zero]
    equal = [row for row in rows if all(step.reduced == row[0].reduced for step in row)]
    if run.world_size < 2 or len(equal) < 2 or len(equal) <= len(rows) / 2:
        return None
    step, text = equal[0][0], "before they are all-reduced, all ranks have the same"
    if not run.all(events.Wrap):
        return wrong(f"{text}: the same data everywhere?", step.where, "no_sampler")
    # As many calls as gradients; a single call for all of them may be about something else.
    where, one_for_each = line_of_reduction(run), len(step.reduced) >= len(step.gradients)
    if where and one_for_each and is_factor(factor_of_mean(run), 1):
        return slow(f"{text}: DDP has averaged them, and this changes nothing", where)


def projected_steps(run):
    """Return the gradients of each step in which they are known, as two projections.

    The first is the mean over the ranks of what their losses give, the second what the step takes.
    """
    return [
        (sum(step.own_gradient for step in row) / len(row), row[0].taken_gradient)
        for row in run.step_rows
        if row[0].taken_gradient is not None and all(step.own_gradient is not None for step in row)
    ]


def factor_of_mean(run):
    """Return how many times the mean gradient of all ranks each step takes, or None if unknown."""
    factors = [ratio(taken, mean) for mean, taken in projected_steps(run)]
    return factors[0] if factors and all(is_factor(each, factors[0]) for each in factors) else None


def gradients_of_earlier_steps(run):
    """Return the verdict if each step takes the gradients of all steps before it, too."""
    total, grows = 0.0, []  # for each step, whether it takes the sum until then, not its own mean
    for mean, taken in projected_steps(run):
        total += mean
        grows.append(is_factor(ratio(taken, total), 1) and not is_factor(ratio(taken, mean), 1))
    if len(grows) > 1 and all(grows[1:]):
        text = "each step takes the gradients of those before it, too: is zero_grad() called?"
        return wrong(text, run.all(events.Step)[0].where)


def is_factor(factor, expected):
    """Return whether a factor between gradients is known, and is this one."""
    return factor is not None and close(factor, expected, FACTOR_TOLERANCE)


def sum_or_divided_twice(run):
    """Return the verdict on gradients that are a sum, or divided twice, instead of a mean."""
    factor, ranks = factor_of_mean(run), run.world_size
    by_ddp = run.all(events.Wrap) and not run.all(events.CommHook)
    where = line_of_reduction(run) or run.all(events.Step)[0].where
    if ranks > 1 and is_factor(factor, ranks) and not losses_are_parts(run):
        text = f"the gradients are the sum over the ranks, {ranks} times their mean: "
        text += "DDP has averaged them before" if by_ddp else f"divide them by {ranks}"
        if not by_ddp and has_sum_for_each_step(run):  # with DDP, such sums are of losses to print
            text += ", unless each loss is divided by a number that the ranks have added up"
            return unsure(text, where, WRONG_RESULTS)
        return wrong(text, where, WRONG_RESULTS)
    # Accumulation may explain the factor.
    accumulates = any(step.backwards > 1 for step in run.all(events.Step))
    if ranks > 1 and is_factor(factor, 1 / ranks) and not accumulates:
        text = f"the gradients are 1/{ranks} of the mean over the ranks: "
        text += "DDP has divided them already" if by_ddp else "they are divided twice"
        return wrong(text, where, WRONG_RESULTS)


def has_sum_for_each_step(run):
    """Return whether the ranks add up as many small tensors as there are steps, not gradients.

    Each loss may be divided by such a sum, in a way that is not seen. Then the sum of the gradients
    is right, not their mean: dist.all_reduce(tokens); (losses / tokens).sum().backward()
    """
    sums = [call for call in run.all(events.Collective) if call.sums and not call.of_small_gradient]
    small = [call for call in sums if call.elements <= run.world_size]  # one number, or one a rank
    return len(small) >= len(run.all(events.Step))  # both of all ranks


def losses_are_parts(run):
    """Return whether each loss is this rank's part of the mean over the samples of all ranks.

    It is divided by the number of ranks, of all their samples, or one that they have added up, such
    as that of all tokens. Then the sum of the gradients is right, not their mean.
    """
    # A loss of two ranks may also be halved for another reason.
    wholes = {run.world_size} if divisions_by_world_size(run) else set()
    if run.training_passes:  # the first batch of each rank is as large as all but its last
        first_pass = run.training_passes[0].values()
        wholes.add(sum(sum(data_pass.sizes[:1]) for data_pass in first_pass))
    totals = {total for event in run.all(events.Totalled) for total in event.total}
    wholes |= {total for total in totals if total > run.world_size}  # else it may be a sum of ones
    return all(
        any(close(divisor, whole) for divisor in step.divisors for whole in wholes)
        for step in run.all(events.Step)
    )


def loss_is_scaled(run):
    """Return the verdict on a loss that the script adds up over the ranks, or divides by N.

    DDP takes the mean over the N ranks anyway.
    """
    ranks, steps = run.world_size, run.all(events.Step)
    if ranks < 2 or not run.all(events.Wrap) or run.all(events.CommHook):
        return None
    if all(step.loss_reduced for step in steps):
        if any(step.divisors for step in steps):
            return None
        text = f"the loss is added up over the ranks: a step takes {ranks} times the mean gradient"
        return wrong(text, steps[0].where, WRONG_RESULTS)
    divided_once = all(step.divisors and step.backwards == 1 for step in steps)
    by_ranks = all(close(divisor, ranks) for step in steps for divisor in step.divisors)
    if divided_once and by_ranks and (lines := divisions_by_world_size(run)):
        text = "the loss is divided by the number of ranks, and DDP divides the gradients again"
        return wrong(text, lines[0], WRONG_RESULTS)


def mean_over_unequal_numbers(run):
    """Return the verdict on losses that are means over another number of elements on each rank.

    In most steps, for the last batch of an epoch may be smaller on one rank.
    """
    unequal = []  # (step of the lowest rank, the numbers of all ranks that differ)
    for row in run.step_rows:
        columns = zip(*map(elements_of_means, row))
        if differing := [each for each in columns if max(each) > min(each) * UNEQUAL]:
            unequal.append((row[0], differing))
    if not run.all(events.Wrap) or len(unequal) <= len(run.step_rows) / 2:
        return None
    step, differing = unequal[0]
    text = "the loss of each rank, or a term of it, is a mean over another number of elements, "
    text += f"first {two_that_differ(differing[0], '.0f')}, and DDP takes the mean of these means: "
    return unsure(f"{text}is that intended?", step.where, WRONG_RESULTS)


def two_that_differ(values, layout):
    """Return in words the value of the lowest rank, and the one that differs most from it."""
    farthest = max(values, key=lambda value: abs(value - values[0]))
    return f"{values[0]:{layout}} and {farthest:{layout}}"


def elements_of_means(step):
    """Return the numbers of elements over which the losses of a step may be means."""
    # In `loss.sum() / count`, the divisor is one. It may also be the number of micro-batches, but
    # that is the same on all ranks.
    return step.means_over + [by for by in step.divisors if by > 1 and by % 1 == 0]


def several_reductions(run):
    """Return the verdict on steps whose gradients are all-reduced more than once.

    As a GAN's, with two backward passes of its discriminator: the first could be in no_sync().
    """
    for number, step in enumerate(run.of_lowest_rank(events.Step), 1):
        if step.reductions > 1:
            text = f"step {number}: {step.reductions} backward passes all-reduce their gradients"
            return slow(text, step.where, "accumulation_without_no_sync")


def no_fault_in_gradients(run):
    """Return that gradients pass, unless some could not be compared."""
    if run.in_join:
        return unseen("inside of join(), the steps of a rank that ran out have no counterpart")
    text = counted(len(run.of_lowest_rank(events.Step)), "step")
    by_hand = not run.all(events.Wrap) or any(step.reduced_all for step in run.all(events.Step))
    if by_hand and not is_factor(factor_of_mean(run), 1):
        text += ", equal on all ranks: whether the mean or the sum, is not seen"
    return passed(text, run.all(events.Step)[0].where)


def gradients_pass_collectives(run):
    """the loss keeps its gradient where it depends on what other ranks gave"""
    lost = run.all(events.GradientLost)  # as after dist.all_gather(parts, mine)
    if own := [event.where for event in lost if event.own_part]:
        text = "backward() ends at what all_gather returned; that of torch.distributed.nn goes on"
        return wrong(text, own[0], "recipes/contrastive")
    if lost:  # and then, parts[rank] = mine
        text = "this rank's own part keeps its gradient, those of others lose it: is that intended?"
        return unsure(text, lost[0].where)
    for event in run.all(events.ReducedInPlace):  # a loss after dist.all_reduce(mine)
        if event.elements > 1:
            text = "backward() takes this sum for the rank's own part: if the ranks' losses are "
            text += f"equal, the gradient is 1/{run.world_size} of the right one, else it is wrong"
            return unsure(text, event.where)
    calls = [call for call in run.all(events.Collective) if call.requires_gradient]
    for call in calls:
        # As after all_gather_into_tensor(): unlike a list of parts, one tensor is not followed.
        into_one_tensor = call.name.startswith("all_gather_")
        if call.cuts_gradient and call.elements > 1 and into_one_tensor:
            return unsure("it has no gradient: does a loss depend on what it returns?", call.where)
    if not calls:
        return unseen("no collective gets a tensor that requires a gradient")
    return passed(counted(len(calls), "call"), calls[0].where)


def clipping_comes_last(run):
    """gradients are clipped after they are averaged and unscaled"""
    for event in run.all(events.Clipped):
        if event.scaled:
            text = "the GradScaler's factor is still in them: call scaler.unscale_(optimizer) first"
            return wrong(text, event.where, "recipes/fp16_scaler")
    calls = run.by_rank(events.Clipped)
    # A norm may be that of a part, that of a model of the rank's own, or not that of the same step.
    if run.is_sharded or run.own_steps or differing_ranks({r: len(calls[r]) for r in calls}):
        return None
    for row in zip(*calls.values()):
        norms = [call.norm for call in row if call.norm is not None and math.isfinite(call.norm)]
        if len(norms) < len(row) or all(close(norm, norms[0], 1e-3) for norm in norms):
            continue  # averaged gradients have one norm, but for its rounding
        # The norms differ here, and the gradients do not when the steps take them.
        if not run.first_difference("gradients"):
            text = f"each rank clips its own, of norm {two_that_differ(norms, '.3g')}, and they "
            return wrong(f"{text}are averaged afterwards", row[0].where)


def rates_are_equal(run):
    """all ranks have the same learning rate"""
    if run.trains_own_parameters:
        return OWN_PARAMETERS
    reason = ""  # why they differ, or will differ in a longer run
    metrics_row = differing_metrics(run)
    counts = counts_that_differ(run, events.Scheduled)
    if metrics_row:
        values = two_that_differ([event.metric for event in metrics_row], ".4g")
        reason = f"the scheduler gets another value on each rank, {values}"
    elif counts:
        reason = f"the scheduler takes {counts}"
    elif line := line_of_uneven_loads(run, lambda load: not load.by_model):
        reason = f"not all ranks load the state of their optimizer ({short(line)})"
    if first := run.first_difference("rates"):
        return rates_differ(run, first, reason)
    if metrics_row:
        text = f"{reason}: sooner or later, they will lower their learning rates at other times"
        return wrong(text, metrics_row[0].where, WRONG_RESULTS)
    if counts:
        text = f"{reason}: should all ranks step it?"
        return unsure(text, run.all(events.Scheduled)[0].where)


def line_of_uneven_loads(run, counts_as_load):
    """Return a line in which some ranks load a state and others do not, or ""."""
    loads = {
        rank: [load for load in of_rank if counts_as_load(load)]
        for rank, of_rank in run.by_rank(events.StateLoaded).items()
    }
    for where, loads_by_rank in grouped(loads, lambda load: load.where).items():
        counts = {len(loads_by_rank.get(rank, ())) for rank in run.events_by_rank}
        if len(counts) > 1:
            return where
    return ""


def rates_differ(run, first, reason):
    """Return the verdict on learning rates that differ from a step on, for this reason, or ""."""
    text = f"from step {first.number} on, they differ from rank to rank"
    group = first.name  # the position of a group of parameters, which a rank may lack
    if all(group < len(step.rates) for step in first.row):
        text += f": {two_that_differ([step.rates[group] for step in first.row], '.3g')}"
    text = f"{text}; {reason}" if reason else text
    step = first.row[0]
    before = [event for event in run.all(events.Scheduled) if event.time < step.time]
    where = max(before, key=lambda event: event.time, default=step).where
    if run.averages_weights:
        return unsure(f"{text}: is that intended?", where, WRONG_RESULTS)
    return wrong(text, where, WRONG_RESULTS)


def differing_metrics(run):
    """Return the first step of plateau schedulers whose metric differs between ranks, or None."""
    for row in run.rows(events.Scheduled):
        metrics = [event.metric for event in row]
        finite = None not in metrics and all(map(math.isfinite, metrics))
        if finite and not all(close(value, metrics[0], 1e-4) for value in metrics):
            return row


def schedule_is_finished(run):
    """a schedule of learning rates ends with the training"""
    if run.returncode != 0:
        return unseen("the script did not finish")
    schedules = {}  # (line, length) -> the steps that it takes
    for event in run.of_lowest_rank(events.Scheduled):
        if event.length:
            schedules.setdefault((event.where, event.length), []).append(event)
    if not schedules:
        return unseen("no scheduler says how many steps it has")
    unfinished = None
    for (where, length), taken in schedules.items():
        text = f"it takes {len(taken)} steps of {length}"
        is_of_all = run.world_size > 1 and close(length, len(taken) * run.world_size, UNEQUAL - 1)
        if is_of_all and len(taken) >= ENOUGH_STEPS:
            text += ": are they counted as one process, which reads all the data, would take them?"
            return unsure(text, where, "recipes/learning_rate")
        if not close(length, len(taken), UNEQUAL - 1, absolute=1):
            unfinished = unseen(f"{text}, perhaps for a longer run")
    return unfinished
