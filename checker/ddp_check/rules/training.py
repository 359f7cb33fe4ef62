"""Rules about gradients, weights, and the mode that a model is in."""

from ddp_check import events
from ddp_check.passes import passes
from ddp_check.rules.base import (
    counted,
    differ,
    first_difference,
    first_infinite,
    is_sharded,
    lowest,
    name_of_first,
    not_applicable,
    passed,
    short,
    slow,
    step_rows,
    unseen,
    unsure,
    wrong,
)

NO_KERNEL = "an autograd kernel was not registered"  # PyTorch's warning


def values_are_finite(run):
    number, row = first_infinite(run)
    if number:
        found = {rank: step for rank, step in zip(run.ranks, row) if step.infinite}
        loss = {rank: step for rank, step in found.items() if step.infinite == "loss"}
        rank, step = next(iter((loss or found).items()))
        text = f"from step {number} on; the first rank whose {step.infinite} is not finite is"
        yield wrong(f"{text} {rank}", step.where)
    if any(not event.finite for event in run.all(events.Final)):
        yield wrong("the final weights are not finite", run.all(events.Step)[-1].where)
    skipped = len(lowest(run.of(events.StepSkipped)))
    text = counted(len(lowest(run.of(events.Step))), "step")
    yield passed(f"{text}; the GradScaler skipped {skipped}" if skipped else text)


# ---------------------------------------------------------------- gradients


def reduced_by_hand(run):
    """Return whether the script reduces the gradients itself, without DDP, in each step."""
    rows, calls = step_rows(run), run.of(events.Collective)
    alike = all(row[0].gradients == step.gradients for row in rows for step in row)
    return bool(rows) and alike and len(lowest(calls)) >= len(rows)


def gradients_are_averaged(run):
    if is_sharded(run):
        yield not_applicable("the gradients are sharded")
    if any(step.closure for step in run.all(events.Step)):
        yield unseen("a closure computes the gradients")
    if weights_are_averaged(run):
        yield not_applicable("the ranks average their weights instead")
    end, _ = first_infinite(run)
    for number, row in enumerate(step_rows(run)[: end and end - 1], 1):
        if all(step.zero for step in row):
            yield wrong(f"step {number}: all gradients are zero", row[0].where)
    yield from reduced_apart(run)
    if end:
        yield unseen("they are not finite: equal ones prove nothing")
    yield from reduced_before(run)
    yield from reduced_too_often(run)
    yield from stepped_apart(run)
    if any(step.joined for step in run.all(events.Step)):
        yield unseen("inside of join(), the steps of a rank that ran out have no counterpart")
    if not run.all(events.Wrap) and not reduced_by_hand(run):
        yield unseen("nothing reduces them: they are equal by chance")
    fewest = min(map(len, run.of(events.Step).values()))
    yield passed(counted(fewest, "step"), run.all(events.Step)[0].where)


def reduced_apart(run):
    """Yield the verdict if a step's gradients differ between ranks."""
    number, row = first_difference(run, "gradients")
    if not number:
        return
    text = f"step {number}: the gradients differ from rank to rank, first that of "
    text += name_of_first(run, row, "gradients")
    ways = {event.model: event.where for event in run.all(events.Bypass)}
    for model in row[0].bypassed:
        where = ways.get(model, row[0].where)
        text += f"; the model is called without its wrapper at {short(where)}"
        yield wrong(text, where, "forward_through_module")
    if not row[0].synced:
        text += "; the last backward() was under no_sync"
        yield wrong(text, row[0].where, "accumulation_without_no_sync")
    follows = not run.all(events.Wrap)
    yield wrong(text, row[0].where, follows=follows)


def reduced_before(run):
    """Yield the verdict if all ranks reduce the same gradients by hand in each step."""
    rows = [row for row in step_rows(run) if all(step.by_hand[1] for step in row)]
    if run.all(events.Wrap) or len(rows) < 2 or len(rows[0]) < 2:
        return
    alike = all(step.by_hand[0] == row[0].by_hand[0] for row in rows for step in row)
    if alike and any(row[0].by_hand[0] for row in rows) and not rows[0][0].zero:
        text = "before they are all-reduced, all ranks have the same: the same data everywhere?"
        yield wrong(text, rows[0][0].where, "no_sampler")


def reduced_too_often(run):
    """Yield the verdict if gradients are all-reduced more than once per step."""
    for number, step in enumerate(lowest(run.of(events.Step)), 1):
        if step.reductions > 1:
            text = f"step {number}: {step.reductions} backward passes all-reduce their gradients"
            text += "; under no_sync(), only the last of them would"
            yield slow(text, step.where, "accumulation_without_no_sync")


def stepped_apart(run):
    """Yield the verdict if the ranks take different numbers of steps."""
    counts = {rank: len(of) for rank, of in run.of(events.Step).items()}
    inside = any(step.joined for step in run.all(events.Step))
    if run.returncode == 0 and not inside and (pair := differ(counts)):
        text = " and ".join(f"rank {rank} takes {counts[rank]}" for rank in pair)
        yield wrong(f"{text} steps", run.all(events.Step)[0].where, "uneven_batches")


def gradients_pass_collectives(run):
    lost = run.all(events.GradientLost)
    if own := next((event for event in lost if event.own), None):
        text = "the backward pass ends at what all_gather returned: torch.distributed.nn.functional"
        yield wrong(f"{text}.all_gather would pass the gradients on", own.where)
    if lost:
        text = "this rank's own part keeps its gradient, those of others lose it: is that intended?"
        yield unsure(text, lost[0].where)
    calls = [one for one in run.all(events.Collective) if one.gradient and one.elements > 1]
    if calls and NO_KERNEL in run.output:
        text = f'{calls[0].name} has no gradient: PyTorch warns that "{NO_KERNEL} …"'
        yield wrong(text, calls[0].where)
    for event in calls:
        if event.name == "all_gather_into_tensor":
            yield unsure("it has no gradient: does a loss depend on what it returns?", event.where)
    yield passed("no loss depends on a collective without one")


def clipping_sees_gradients(run):
    for event in run.all(events.Clipped):
        if event.scaled:
            text = "the GradScaler's factor is still in them: call scaler.unscale_(optimizer) first"
            yield wrong(text, event.where)
    yield passed(counted(len(lowest(run.of(events.Clipped))), "call"))


def rates_are_equal(run):
    number, row = first_difference(run, "rates")
    if number:
        rates = [f"{rate:.3g}" for rate in (row[0].rates[0], row[1].rates[0])]
        text = f"from step {number} on, they differ from rank to rank: {' and '.join(rates)}"
        before = [one for one in run.all(events.Scheduled) if one.time < row[0].time]
        where = max(before, key=lambda one: one.time).where if before else row[0].where
        yield wrong(f"{text}; does each rank's scheduler see its own loss?", where)
    steps = lowest(run.of(events.Step))
    taken = lowest(run.of(events.Scheduled))
    if len(run.ranks) > 1 and len(taken) >= len(run.ranks) * len(steps) > 0:
        text = f"the scheduler takes {len(taken)} steps, the optimizer {len(steps)}: is it meant"
        yield unsure(f"{text} to?", taken[0].where)
    yield passed(counted(len({str(step.rates) for step in steps}), "rate"))


# ---------------------------------------------------------------- weights


def weights_are_averaged(run):
    """Return whether ranks without DDP take steps of their own, and then agree again."""
    rows = step_rows(run)
    if run.all(events.Wrap) or not rows or not run.all(events.Collective):
        return False
    apart = [any(one.gradients != row[0].gradients for one in row) for row in rows]
    first = next((at for at, value in enumerate(apart) if value), None)
    if first is None:
        return False
    agree = [all(one.weights == row[0].weights for one in row) for row in rows[first + 1 :]]
    final = [[event.weights for event in of] for of in run.of(events.Final).values()]
    return any(agree) or (bool(final) and all(final) and all(one == final[0] for one in final))


def weights_agree(run):
    if is_sharded(run):
        yield not_applicable("the parameters are sharded")
    wraps, steps = run.of(events.Wrap), run.all(events.Step)
    wrapped = any(wraps.values())
    if not steps and not wrapped:
        yield unseen("nothing was trained")
    if weights_are_averaged(run):
        yield passed("the ranks average them", steps[0].where)
    if not wrapped and not reduced_by_hand(run):
        text = "no model is wrapped in DistributedDataParallel: each rank trains its own"
        yield wrong(text, steps[0].where)
    yield from wrapped_apart(run)
    if wrapped and (foreign := next((step for step in steps if step.foreign), None)):
        text = f"the optimizer changes {foreign.foreign} parameters that are in no wrapped model"
        yield wrong(text, foreign.where, "optimizer_of_other_parameters")
    yield from trained_apart(run)
    yield from ended_apart(run)
    if first_infinite(run)[0]:
        yield unseen("they are not finite: equal ones prove nothing")
    if wrapped:
        yield passed("bit for bit", lowest(wraps)[0].where)
    yield passed("gradients reduced by hand, bit for bit", steps[0].where)


def wrapped_apart(run):
    """Yield the verdict if the ranks wrap different models."""
    wraps = run.of(events.Wrap)
    if pair := differ({rank: len(of) for rank, of in wraps.items()}):
        counts = " and ".join(f"rank {rank} wraps {len(wraps[rank])}" for rank in pair)
        yield wrong(f"{counts} models") if run.returncode == 0 else unseen(f"{counts} models")
    for what, key in (("parameters", "shapes"), ("weights", "weights")):
        if pair := differ({rank: [getattr(one, key) for one in of] for rank, of in wraps.items()}):
            text = f"after DDP(...), the {what} of ranks {pair[0]} and {pair[1]} differ"
            yield wrong(text, wraps[pair[0]][0].where)


def trained_apart(run):
    """Yield the verdict if the weights of the ranks diverge in training."""
    number, row = first_difference(run, "weights")
    if not number:
        return
    text = f"before step {number}, the weights differ from rank to rank, first "
    text += name_of_first(run, row, "weights")
    if cause := cause_of(run, number):
        yield wrong(f"{text}; {cause}", row[0].where, "edit_on_one_rank", follows=True)
    for where in loaded_apart(run):
        yield wrong(f"{text}; not all ranks load a state after DDP(...)", where, "edit_on_one_rank")
    yield wrong(f"{text}; were they edited?", row[0].where, "edit_on_one_rank")


def cause_of(run, number):
    """Return what made the weights differ before this step, in words, or an empty string."""
    for name, cause in (("rates", "learning rates"), ("gradients", "gradients")):
        before, _ = first_difference(run, name)
        if before and before < number:
            return f"it follows from the {cause} in step {before}"
    return ""


def loaded_apart(run):
    """Return the lines in which only some ranks load a state after the models are wrapped."""
    found = {
        rank: [one.where for one in of if one.wraps]
        for rank, of in run.of(events.StateLoaded).items()
    }
    all_lines = {line for of in found.values() for line in of}
    return [line for line in all_lines if len({of.count(line) for of in found.values()}) > 1]


def ended_apart(run):
    """Yield the verdict if the final weights of the ranks differ or are missing."""
    final = run.of(events.Final)
    if run.returncode != 0 or not all(final.values()):
        yield unseen("the run did not finish")
    if pair := differ({rank: [event.weights for event in of] for rank, of in final.items()}):
        text = f"at the end, the weights of ranks {pair[0]} and {pair[1]} differ"
        if any(step.joined for step in run.all(events.Step)):
            yield wrong(f"{text}: join() should have made them equal", "", "uneven_batches")
        if cause := cause_of(run, len(step_rows(run)) + 1):
            yield wrong(f"{text}; {cause}", follows=True)
        lines = loaded_apart(run)
        text += ": not all ranks load a state here" if lines else ": were they edited on one rank?"
        yield unsure(text, lines[0] if lines else "", "edit_on_one_rank")


# ---------------------------------------------------------------- modes and evaluation


def evaluated_models_agree(run):
    found = {}  # what is evaluated, where and when -> rank -> checksums
    for rank, of in run.of(events.Evaluated).items():
        for event in of:
            key = event.model, event.where, event.steps, tuple(event.values)
            found.setdefault(key, {}).setdefault(rank, event.values)
    shared = {key: of for key, of in found.items() if len(of) > 1}
    for (model, where, _, names), of in shared.items():
        bad = [name for name in names if differ({rank: sums[name] for rank, sums in of.items()})]
        if bad and not first_difference(run, "weights")[0]:
            yield wrong(
                f"{bad[0]} of {model} differs from rank to rank", where, "batchnorm_of_rank_0"
            )
        if bad:
            yield unseen("the weights differ in training already")
    if not shared:
        yield not_applicable("no model is evaluated by several ranks")
    yield passed(counted(len(shared), "evaluation"), next(iter(shared))[1])


def training_mode(run):
    steps = lowest(run.of(events.Step)) or run.all(events.Step)
    if not any(step.training for step in steps):
        yield unsure("all steps are taken in evaluation mode", steps[0].where)
    for number, step in enumerate(steps, 1):
        if not step.training:
            text = f"step {number} is taken in evaluation mode"
            yield wrong(text, step.where, "eval_never_undone")
    yield passed(f"{len(steps)} steps", steps[0].where)


def evaluation_mode(run):
    looked = {
        (rank, one.number)
        for rank, of in passes(run).items()
        for one in of
        if one.batches and not one.is_training
    }
    for rank, found in run.of(events.Evaluated).items():
        for event in found:
            if event.wrapped and event.noisy and (rank, event.number) in looked:
                text = f"it is in training mode: {event.noisy} changes what it returns"
                yield wrong(text, event.where)
    if not looked:
        yield unseen("no wrapped model was evaluated with a DataLoader")
    yield passed("or its layers do the same in both")


def unused_search_is_needed(run):
    said = "find_unused_parameters=True was specified" in run.output
    if said and not any(step.unused for step in run.all(events.Step)):
        text = "it costs time, and every parameter is used in each step"
        yield slow(text, run.all(events.Wrap)[0].where, "find_unused_without_need")
    yield passed("DDP does not warn about it")
