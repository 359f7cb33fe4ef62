"""Rules about gradients, weights, and the mode that a model is in."""

from collections import Counter

from ddp_check import events
from ddp_check.ranks import counted, differ, lowest, short
from ddp_check.rules.base import not_applicable, passed, slow, unseen, unsure, wrong

NO_KERNEL = "an autograd kernel was not registered"  # PyTorch's warning
NOT_FINITE = unseen("they are not finite: equal ones prove nothing")
PLATEAU = "lookup/wrong_results"  # the page about learning rates that differ


def values_are_finite(run):
    """losses, gradients and weights are finite"""
    number, row = run.first_infinite
    if number:
        found = [(rank, step) for rank, step in zip(run.events_by_rank, row) if step.infinite]
        rank, step = min(found, key=lambda one: one[1].infinite != "loss")
        text = f"from step {number} on; the first rank whose {step.infinite} is not finite is"
        yield wrong(f"{text} {rank}", step.where)
    if any(not event.finite for event in run.all(events.Final)):
        yield wrong("the final weights are not finite", run.all(events.Step)[-1].where)


def uneven(run, kind):
    """Return how many events of a kind two ranks have, in words, if these numbers differ."""
    counts = {rank: len(of) for rank, of in run.by_rank(kind).items()}
    pair = () if run.returncode != 0 or run.in_join else differ(counts) or ()
    return " and ".join(f"{counted(counts[rank], 'step')} on rank {rank}" for rank in pair)


def adds_at(run):
    """Return the line in which the script most often adds up tensors over the ranks, or ""."""
    calls = [one for one in run.all(events.Collective) if one.sums and one.elements > 1]
    return max(lines, key=lines.get) if (lines := Counter(one.where for one in calls)) else ""


def gradients_are_averaged(run):
    """each step takes the mean gradient of all ranks"""
    steps, wrapped = run.by_rank(events.Step), run.all(events.Wrap)
    if run.is_sharded:
        yield not_applicable("the gradients are sharded")
    if any(step.closure for step in run.all(events.Step)):
        yield unseen("a closure computes the gradients")
    if weights_are_averaged(run):
        yield not_applicable("the ranks average their weights instead")
    for number, row in enumerate(run.step_rows, 1):
        if all(step.zero for step in row):
            yield wrong(f"step {number}: all gradients are zero", row[0].where)
    yield from reduced_apart(run)
    if run.first_infinite[0]:
        yield NOT_FINITE
    yield from reduced_twice(run)
    for number, step in enumerate(lowest(steps), 1):
        if step.reductions > 1:
            text = f"step {number}: {step.reductions} backward passes all-reduce their gradients"
            text += "; under no_sync(), only the last of them would"
            yield slow(text, step.where, "accumulation_without_no_sync")
    if run.in_join:
        yield unseen("inside of join(), the steps of a rank that ran out have no counterpart")
    where = run.all(events.Step)[0].where
    if counts := uneven(run, events.Step):
        yield wrong(f"the optimizer takes {counts}", where, "uneven_batches")
    text = "" if wrapped else ", equal on all ranks: whether the mean or the sum, is not seen"
    yield passed(counted(len(lowest(steps)), "step") + text, where)


def reduced_apart(run):
    number, row, name = run.first_difference("gradients")
    if not number:
        return
    text = f"step {number}: the gradients differ from rank to rank, first that of {name}"
    ways = {event.model: event.where for event in run.all(events.Bypass)}
    for model in row[0].bypassed:
        where = ways.get(model, row[0].where)
        text += f"; the model is called without its wrapper at {short(where)}"
        yield wrong(text, where, "forward_through_module")
    if not row[0].synced:
        text += "; the last backward() was under no_sync"
        yield wrong(text, row[0].where, "accumulation_without_no_sync")
    cause = row[0].foreign and name.startswith("parameter ")  # it has no name in a wrapped model
    by_hand = row[0].reduced and adds_at(run)
    follows = bool(cause or not (run.all(events.Wrap) or by_hand))
    yield wrong(text, by_hand or row[0].where, follows=follows)


def reduced_twice(run):
    """Yield the verdict if all ranks reduce the same gradients by hand in each step."""
    rows = [row for row in run.step_rows if all(step.reduced_all for step in row)]
    same = [row for row in rows if all(step.reduced == row[0].reduced for step in row)]
    often = len(same) > max(1, len(rows) / 2)  # with some, more is reduced, such as losses
    where = adds_at(run)
    if not where or not often or len(run.events_by_rank) < 2 or same[0][0].zero:
        return
    text = "before they are all-reduced, all ranks have the same"
    if not run.all(events.Wrap):
        yield wrong(f"{text}: the same data everywhere?", same[0][0].where, "no_sampler")
    elif len(same[0][0].reduced) >= len(same[0][0].gradients):  # else they are no gradients
        text += (
            f": DDP has averaged them, and their sum is {len(run.events_by_rank)} times as large"
        )
        yield unsure(f"{text}. Is it divided?", where)


def gradients_pass_collectives(run):
    """gradients pass what is gathered"""
    lost = run.all(events.GradientLost)
    if own := [event.where for event in lost if event.own_part]:
        text = "the backward pass ends at what all_gather returned: AllGather would pass them on"
        yield wrong(text, own[0], "recipes/contrastive")
    if lost:
        text = "this rank's own part keeps its gradient, those of others lose it: is that intended?"
        yield unsure(text, lost[0].where)
    calls = [one for one in run.all(events.Collective) if one.cuts_gradient and one.elements > 1]
    if calls and NO_KERNEL in run.output:
        yield wrong(f'{calls[0].name} has no gradient: "{NO_KERNEL} …"', calls[0].where)
    for event in calls:
        if event.name.startswith("all_gather_"):  # into one tensor
            yield unsure("it has no gradient: does a loss depend on what it returns?", event.where)


def clipping_sees_gradients(run):
    """gradients are clipped when no scale is in them"""
    for event in run.all(events.Clipped):
        if event.scaled:
            text = "the GradScaler's factor is still in them: call scaler.unscale_(optimizer) first"
            yield wrong(text, event.where, "recipes/fp16_scaler")


def rates_are_equal(run):
    """all ranks have the same learning rate"""
    scheduled, counts = run.all(events.Scheduled), uneven(run, events.Scheduled)
    number, row, _ = run.first_difference("rates")
    if number:
        rates = " and ".join(f"{step.rates[0]:.3g}" for step in row[:2])
        text = f"from step {number} on, they differ from rank to rank: {rates}"
        text += f"; the scheduler takes {counts}" if counts else "; does each see its own loss?"
        before = [one for one in scheduled if one.time < row[0].time]
        yield wrong(text, max(before, key=lambda one: one.time, default=row[0]).where, PLATEAU)
    if counts:
        yield unsure(f"the scheduler takes {counts}: should all ranks step it?", scheduled[0].where)
    steps, taken = lowest(run.by_rank(events.Step)), lowest(run.by_rank(events.Scheduled))
    if len(run.events_by_rank) > 1 and len(taken) >= len(run.events_by_rank) * len(steps) > 0:
        text = f"the scheduler takes {len(taken)} steps, the optimizer {len(steps)}: is that meant?"
        yield unsure(text, taken[0].where)


def weights_are_averaged(run):
    """Return whether ranks without DDP take steps of their own, and then agree again."""
    first, *_ = run.first_difference("gradients")
    if run.all(events.Wrap) or not first or not run.all(events.Collective):
        return False
    rows, final = run.step_rows[first:], run.final_weights
    agree = any(all(one.weights == row[0].weights for one in row) for row in rows)
    return agree or (bool(final) and differ(final) is None)


def weights_agree(run):
    """all ranks wrap the same model, and end with the same weights"""
    wrapped, steps = run.all(events.Wrap), run.all(events.Step)
    if run.is_sharded:
        yield not_applicable("the parameters are sharded")
    if not steps and not wrapped:
        yield unseen("nothing was trained")
    if weights_are_averaged(run):
        yield passed("the ranks average them", steps[0].where)
    calls = lowest(run.by_rank(events.Collective))
    by_hand = not run.first_difference("gradients")[0] and len(calls) >= len(run.step_rows) > 0
    if not wrapped and not by_hand:
        partly, text = bool(steps[0].reduced), "no model is wrapped in DistributedDataParallel"
        text += ", and not all gradients are reduced" if partly else ": each rank trains its own"
        yield wrong(text, steps[0].where, follows=partly)
    if wrapped and (foreign := next((step for step in steps if step.foreign), None)):
        text = f"the optimizer changes {foreign.foreign} parameters that are in no wrapped model"
        text += f": {short(wrapped[-1].where)} wraps others"
        yield wrong(text, foreign.where, "optimizer_of_other_parameters")
    yield from ended_apart(run)
    number, row, name = run.first_difference("buffers")
    if number:
        text = f"before step {number}, the buffer {name} differs from rank to rank"
        yield unsure(f"{text}: should it hold what all ranks have seen?", row[0].where)
    if run.first_infinite[0]:
        yield NOT_FINITE
    yield passed("bit for bit", (wrapped or steps)[0].where)


def ended_apart(run):
    """Yield the verdict if the weights of the ranks differ, in a step or at the end."""
    number, row, name = run.first_difference("weights")
    judge, where, final = wrong, "", run.final_weights
    if number:
        text, where = f"before step {number}, the weights differ from rank to rank", row[0].where
        text += f", first {name}"
    elif run.returncode != 0 or not final:
        yield unseen("the run did not finish")
    elif pair := differ(final):
        text, judge = f"at the end, the weights of ranks {pair[0]} and {pair[1]} differ", unsure
    else:
        return
    if run.in_join and not number:
        yield wrong(f"{text}: join() should have made them equal", "", "uneven_batches")
    for field in ("rates", "gradients", "buffers"):
        before, *_ = run.first_difference(field)
        if before and before < (number or len(run.step_rows) + 1):
            cause = field.replace("rates", "learning rates")
            text += f"; it follows from the {cause} in step {before}"
            yield wrong(text, where, follows=True)
    loads = [(rank, one) for rank, of in run.by_rank(events.StateLoaded).items() for one in of]
    times = Counter((one.where, rank) for rank, one in loads if one.wraps)
    for line, _ in times:
        if len({times[line, rank] for rank in run.events_by_rank}) > 1:
            yield judge(f"{text}: not all ranks load a state here", line, "edit_on_one_rank")
    if number == 1 and not run.all(events.Wrap):
        text += "; broadcast them at the start, or seed all ranks alike"
    yield judge(f"{text}; were they edited?", where, "edit_on_one_rank")


def evaluated_models_agree(run):
    """all ranks evaluate the same model, buffers included"""
    found = {}  # what is evaluated, where and when -> rank -> checksums
    for rank, of in run.by_rank(events.Evaluated).items():
        for event in of:
            key = event.model, event.where, event.steps, tuple(event.values)
            found.setdefault(key, {}).setdefault(rank, event.values)
    for (model, where, _, names), of in found.items():
        bad = [name for name in names if differ({rank: sums[name] for rank, sums in of.items()})]
        if bad and any(run.first_difference(key)[0] for key in ("weights", "rates", "gradients")):
            yield unseen("what the ranks train differs already")
        if bad:
            page = "batchnorm_of_rank_0" if "running_" in bad[0] else "recipes/ema"
            yield wrong(f"{bad[0]} of {model} differs from rank to rank", where, page)
    if not any(len(of) > 1 for of in found.values()):
        yield not_applicable("no model is evaluated by several ranks")


def training_mode(run):
    """the model is in training mode in each step"""
    steps = lowest(run.by_rank(events.Step)) or run.all(events.Step)
    if not any(step.training for step in steps):
        yield unsure("all steps are taken in evaluation mode", steps[0].where)
    for number, step in enumerate(steps, 1):
        if not step.training:
            yield wrong(f"step {number} is in evaluation mode", step.where, "eval_never_undone")


def evaluation_mode(run):
    """the model is in evaluation mode when it is evaluated"""
    found = {
        rank: [one for one in of if not one.is_training] for rank, of in run.passes_by_rank.items()
    }
    looked = {(rank, one.number) for rank, of in found.items() for one in of if one.batches}
    for rank, of in run.by_rank(events.Evaluated).items():
        for event in of:
            if event.wrapped and event.noisy and (rank, event.number) in looked:
                text = f"it is in training mode: {event.noisy} changes what it returns"
                yield wrong(text, event.where)
    if not looked:
        yield unseen("no wrapped model was evaluated with a DataLoader")


def unused_search_is_needed(run):
    """find_unused_parameters is set only where it is needed"""
    said = "find_unused_parameters=True was specified" in run.output
    if said and not any(step.unused for step in run.all(events.Step)):
        where = run.all(events.Wrap)[0].where
        yield slow("every parameter is used in each step", where, "find_unused_without_need")
