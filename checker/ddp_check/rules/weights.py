"""Rules about weights and buffers, and the mode that a model is in."""

import math
from itertools import chain

from ddp_check import events
from ddp_check.ranks import counted, differing_ranks, grouped, short
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong
from ddp_check.rules.gradients import NOT_FINITE, line_of_uneven_loads


def weights_agree(run):
    """all ranks wrap the same model, and end with the same weights"""
    wrapped, steps = run.all(events.Wrap), run.all(events.Step)
    if run.is_sharded:
        return not_applicable("the parameters are sharded")
    if not steps and not wrapped:
        return unseen("nothing was trained")
    differing = run.first_difference("weights") or differing_ranks(run.final_weights)
    if run.goes_another_way and differing:
        text = "the weights differ from rank to rank: are they averaged now and then?"
        return unsure(text, steps[0].where)
    if verdict := nothing_is_wrapped(run) or foreign_parameters(run) or weights_differ(run):
        return verdict
    if first := run.first_difference("buffers"):
        text = f"before step {first.number}, the buffer {first.name} differs from rank to rank: "
        return unsure(f"{text}should it hold what all ranks have seen?", first.row[0].where)
    if run.first_infinite:
        return NOT_FINITE
    return passed("bit for bit", (wrapped or steps)[0].where)


def nothing_is_wrapped(run):
    """Return the verdict on ranks that train models of their own."""
    rows, calls = run.step_rows, run.of_lowest_rank(events.Collective)
    if run.all(events.Wrap) or (run.returncode != 0 and not rows):  # it failed in the first step
        return None
    if len(calls) >= len(rows) > 0 and not run.first_difference("gradients"):
        return None  # they may average their gradients by hand
    text = "no model is wrapped in DistributedDataParallel: each rank trains its own"
    return wrong(text, run.all(events.Step)[0].where)


def foreign_parameters(run):
    """Return the verdict on an optimizer that changes what is in no wrapped model.

    It may, if the script itself reduces their gradients: then all ranks have the same ones. Without
    gradients they do not change, but may have been meant to be those of the wrapped model.
    """
    wrapped = run.all(events.Wrap)
    steps = [row[0] for row in run.step_rows if row[0].unwrapped]
    if not wrapped or not steps:
        return None
    names = {name for step in run.steps for name in step.gradients}
    get_gradients = any(
        value and name.startswith(events.PARAMETER)
        for step in steps
        for name, value in step.gradients.items()
    )
    # What has no gradient stays as it is; and all of the wrapped model is trained:
    if not get_gradients and names.issuperset({*wrapped[0].names} - {*wrapped[0].frozen}):
        return None
    if not get_gradients or run.first_difference("gradients"):
        text = f"the optimizer has {counted(steps[0].unwrapped, 'parameter')} of a model that is "
        text += f"not wrapped: {short(wrapped[-1].where)} wraps others"
        return wrong(text, steps[0].where, "optimizer_of_other_parameters")


def weights_differ(run):
    """Return the verdict on weights that differ from rank to rank, in a step or at the end."""
    if first := run.first_difference("weights"):
        text = f"before step {first.number}, the weights differ from rank to rank, first "
        return with_earlier_cause(run, first.number, wrong, text + first.name, first.row[0].where)
    if run.returncode != 0:
        return unseen("the run did not finish")
    if not run.final_weights:
        return unseen("the final weights of a rank are not known")
    if pair := differing_ranks(run.final_weights):
        text = f"at the end, the weights of ranks {pair[0]} and {pair[1]} differ"
        if run.in_join:
            return wrong(f"{text}: join() should have made them equal", "", "uneven_batches")
        return with_earlier_cause(run, len(run.step_rows) + 1, unsure, text)


def with_earlier_cause(run, number, say, text, where=""):
    """Return the verdict on weights that differ before the step of this number.

    The first of these that is seen is the cause. From 2 on, it is `say`, wrong or unsure:
    1. rates, gradients or buffers that differed in an earlier step: wrong
    2. a state that not all ranks load
    3. a state that they may load at other times
    4. other weights at the start
    5. an edit, if it is none of these
    """
    causes = {"rates": "learning rates", "gradients": "gradients", "buffers": "buffers"}
    for field_name, words in causes.items():
        earlier = run.first_difference(field_name)
        if earlier and earlier.number < number:  # 1
            text += f"; it follows from the {words} in step {earlier.number}"
            return wrong(text, where, follows=True)
    if line := line_of_uneven_loads(run, lambda load: load.wraps > 0):  # 2
        return say(f"{text}: not all ranks load a state here", line, "edit_on_one_rank")
    rows, loads = run.step_rows, [load for load in run.all(events.StateLoaded) if load.wraps]
    if number <= len(rows):
        loads = [load for load in loads if load.time < rows[number - 1][0].time]
    if loads:  # 3
        text += ": does each rank load the same state here, and only when it is written?"
        return say(text, loads[-1].where, "missing_barrier")
    if number == 1 and not run.all(events.Wrap):  # 4
        text += "; broadcast them at the start, or seed all ranks alike"
        return say(text, where, "recipes/in_buckets")
    return say(f"{text}; were they edited?", where, "edit_on_one_rank")  # 5


def evaluated_models_agree(run):
    """all ranks evaluate the same model, buffers included"""
    if run.in_join:
        return unseen("the ranks take different numbers of steps in join()")
    steps = run.all(events.Step)
    common = {  # before it is wrapped, a model may begin with other weights on each rank
        rank: [event for event in of_rank if event.wrapped or event.steps or not steps]
        for rank, of_rank in run.by_rank(events.Evaluated).items()
    }
    evaluated = grouped(  # what is equal in these should be one and the same model
        common,
        lambda event: (event.model, event.where, event.steps, tuple(event.checksums)),
    )
    groups = [
        (model, where, name, events_by_rank)
        for (model, where, _, names), events_by_rank in evaluated.items()
        for name in names
    ]
    surely = [group for group in groups if not agree_on(*group[2:])]
    differing = surely
    if not any(len(events_by_rank) > 1 for events_by_rank in evaluated.values()):
        return not_applicable("no model is evaluated by several ranks")
    if not differing:
        return None
    if any(map(run.first_difference, ("weights", "rates", "gradients"))):
        return unseen("what the ranks train differs already")
    model, where, name, _ = differing[0]
    text = f"{name} of {model} differs from rank to rank"
    # As where ranks try out candidates, without an optimizer, or keep a state in a buffer:
    if not (surely and steps) or any(name in step.buffers for step in steps):
        return unsure(f"{text}: is that intended?", where)
    return wrong(text, where, "batchnorm_of_rank_0" if "running_" in name else "recipes/ema")


def agree_on(name, events_by_rank):
    """Return whether all ranks evaluate a model with one and the same value under a name.

    A rank has several values if it changes them between evaluations without an optimizer.
    """
    checksums = [{event.checksums[name] for event in each} for each in events_by_rank.values()]
    return bool(set.intersection(*checksums))


def training_mode(run):
    """the model is in training mode in each step"""
    steps = run.of_lowest_rank(events.Step) or run.all(events.Step)  # or rank 0 takes none
    numbers = [number for number, step in enumerate(steps, 1) if not step.training]
    if not numbers:
        return None
    if len(numbers) == len(steps):
        return unsure("all steps are taken in evaluation mode", steps[0].where)
    step, text = steps[numbers[0] - 1], f"step {numbers[0]} is in evaluation mode"
    # The fault: all steps before the first evaluation are in training mode, and none after it. An
    # evaluation before the first training step, as a test, does not count.
    training_begun = next(step.time for step in steps if step.training)
    evaluated = run.of_lowest_rank(events.Evaluated) or run.all(events.Evaluated)
    times = [event.time for event in evaluated if event.wrapped and event.time > training_begun]
    first = min(times, default=math.inf)
    if all(each.training == (each.time < first) for each in steps):
        return wrong(text, step.where, "eval_never_undone")
    return unsure(f"{text}: is that intended?", step.where, "eval_never_undone")


def evaluation_mode(run):
    """the model is in evaluation mode when it is evaluated"""
    all_passes = chain(*run.passes_by_rank.values())
    trained = {data_pass.dataset for data_pass in all_passes if data_pass.is_training}
    # A pass over such data without a step may be for the statistics of BatchNorm, as update_bn's.
    evaluating = {  # (rank, number of the pass)
        (rank, data_pass.pass_number)
        for rank, passes in run.passes_by_rank.items()
        for data_pass in passes
        if data_pass.batches and data_pass.dataset not in trained
    }
    evaluated = [
        event
        for rank, of_rank in run.by_rank(events.Evaluated).items()
        for event in of_rank
        if event.wrapped and (rank, event.pass_number) in evaluating
    ]
    for event in evaluated:
        if event.noisy:
            text = f"it is in training mode: {event.noisy} changes what it returns"
            return wrong(text, event.where)
    if not evaluated:
        return unseen("no model that is trained is evaluated on other data from a DataLoader")
    if all(event.training for event in evaluated):
        return not_applicable("eval() is not called, and no layer of the model would change")
