"""Rules about weights and buffers, and the mode that a model is in."""

from collections import Counter

from ddp_check import events
from ddp_check.ranks import differing_ranks, short
from ddp_check.rules.base import not_applicable, passed, slow, unseen, unsure, wrong
from ddp_check.rules.gradients import NOT_FINITE


def weights_agree(run):
    """all ranks wrap the same model, and end with the same weights"""
    wrapped = run.all(events.Wrap)
    steps = run.all(events.Step)
    if run.is_sharded:
        return not_applicable("the parameters are sharded")
    if not steps and not wrapped:
        return unseen("nothing was trained")
    if run.averages_weights:
        return passed("the ranks average them", steps[0].where)
    if verdict := not_wrapped(run) or foreign_parameters(run) or ended_apart(run):
        return verdict
    if first := run.first_difference("buffers"):
        text = f"before step {first.number}, the buffer {first.name} differs from rank to rank"
        text += ": each changes it by its own data, and DDP overwrites it with that of rank 0. "
        return unsure(f"{text}Should it hold what all ranks have seen?", first.row[0].where)
    if run.first_infinite:
        return NOT_FINITE
    return passed("bit for bit", (wrapped or steps)[0].where)


def not_wrapped(run):
    """Return the verdict on ranks that train models of their own."""
    steps, rows = run.all(events.Step), run.step_rows
    calls = run.of_lowest_rank(events.Collective)
    # With a collective for each step, the ranks may average their gradients by hand.
    may_reduce = len(rows) > 0 and len(calls) >= len(rows)
    if run.all(events.Wrap) or (may_reduce and not run.first_difference("gradients")):
        return None
    partly, text = bool(steps[0].reduced), "no model is wrapped in DistributedDataParallel"
    if steps[0].reduced_all:
        text += ", and what the ranks reduce by hand is not the same on all"
    else:
        text += ", and not all gradients are reduced" if partly else ": each rank trains its own"
    return wrong(text, steps[0].where, follows=partly)


def foreign_parameters(run):
    """Return the verdict on an optimizer that changes what is in no wrapped model."""
    wrapped = run.all(events.Wrap)
    for step in run.all(events.Step):
        if wrapped and step.foreign:
            text = f"the optimizer changes {step.foreign} parameters that are in no wrapped model"
            text += f": {short(wrapped[-1].where)} wraps others"
            return wrong(text, step.where, "optimizer_of_other_parameters")


def ended_apart(run):
    """Return the verdict on weights that differ from rank to rank, in a step or at the end."""
    if first := run.first_difference("weights"):
        text = f"before step {first.number}, the weights differ from rank to rank"
        return apart_since(
            run, first.number, wrong, f"{text}, first {first.name}", first.row[0].where
        )
    if run.returncode != 0 or not run.final_weights:
        return unseen("the run did not finish")
    if pair := differing_ranks(run.final_weights):
        text = f"at the end, the weights of ranks {pair[0]} and {pair[1]} differ"
        if run.in_join:
            return wrong(f"{text}: join() should have made them equal", "", "uneven_batches")
        return apart_since(run, len(run.step_rows) + 1, unsure, text)


def apart_since(run, number, verdict, text, where=""):
    """Return the verdict on weights that differ before the step of a number, with the cause.

    Without a cause, the verdict is what `verdict` makes of the text.
    """
    causes = {"rates": "learning rates", "gradients": "gradients", "buffers": "buffers"}
    for field_name, words in causes.items():
        earlier = run.first_difference(field_name)
        if earlier and earlier.number < number:
            text += f"; it follows from the {words} in step {earlier.number}"
            return wrong(text, where, follows=True)
    if line := loaded_by_some(run):
        return verdict(f"{text}: not all ranks load a state here", line, "edit_on_one_rank")
    loads = [load for load in run.all(events.StateLoaded) if load.wraps]
    if number == 1 and loads:
        text += ": after the model was wrapped, each rank loads a state of its own here"
        return verdict(text, loads[-1].where, "edit_on_one_rank")
    if number == 1 and not run.all(events.Wrap):
        text += "; broadcast them at the start, or seed all ranks alike"
    return verdict(f"{text}; were they edited?", where, "edit_on_one_rank")


def loaded_by_some(run):
    """Return a line in which not all ranks load a state into a wrapped model, or ""."""
    load_counts = Counter(
        (event.where, rank)
        for rank, loads in run.by_rank(events.StateLoaded).items()
        for event in loads
        if event.wraps
    )
    for line, _ in load_counts:
        if len({load_counts[line, rank] for rank in run.events_by_rank}) > 1:
            return line
    return ""


def evaluated_models_agree(run):
    """all ranks evaluate the same model, buffers included"""
    checksums = {}  # (model, where, steps before, names) -> rank -> [{name: checksum}, …]
    for rank, evaluations in run.by_rank(events.Evaluated).items():
        for event in evaluations:
            key = event.model, event.where, event.steps, tuple(event.checksums)
            checksums.setdefault(key, {}).setdefault(rank, []).append(event.checksums)
    for (model, where, _, names), values_by_rank in checksums.items():
        apart = []
        for name in names:  # several values of a rank: it changes them without an optimizer
            values = [{found[name] for found in of_rank} for of_rank in values_by_rank.values()]
            if not set.intersection(*values):
                apart.append(name)
        if apart and trained_apart(run):
            return unseen("what the ranks train differs already")
        if apart:
            page = "batchnorm_of_rank_0" if "running_" in apart[0] else "recipes/ema"
            return wrong(f"{apart[0]} of {model} differs from rank to rank", where, page)
    if not any(len(values_by_rank) > 1 for values_by_rank in checksums.values()):
        return not_applicable("no model is evaluated by several ranks")


def trained_apart(run):
    """Return whether what the ranks train differs from rank to rank."""
    fields = ("weights", "rates", "gradients")
    return run.averages_weights or any(map(run.first_difference, fields))


def training_mode(run):
    """the model is in training mode in each step"""
    steps = run.of_lowest_rank(events.Step) or run.all(events.Step)
    if not any(step.training for step in steps):
        return unsure("all steps are taken in evaluation mode", steps[0].where)
    for number, step in enumerate(steps, 1):
        if not step.training:
            return wrong(f"step {number} is in evaluation mode", step.where, "eval_never_undone")


def evaluation_mode(run):
    """the model is in evaluation mode when it is evaluated"""
    evaluation_passes = {  # (rank, number of the pass)
        (rank, entry.pass_number)
        for rank, passes in run.passes_by_rank.items()
        for entry in passes
        if entry.batches and not entry.is_training
    }
    for rank, evaluated in run.by_rank(events.Evaluated).items():
        for event in evaluated:
            if event.wrapped and event.noisy and (rank, event.pass_number) in evaluation_passes:
                text = f"it is in training mode: {event.noisy} changes what it returns"
                return wrong(text, event.where)
    if not evaluation_passes:
        return unseen("no wrapped model was evaluated with a DataLoader")


def unused_search_is_needed(run):
    """find_unused_parameters is set only where it is needed"""
    if "find_unused_parameters" not in run.source:
        return not_applicable("it is not set")
    warned = "find_unused_parameters=True was specified" in run.output
    if warned and not any(step.unused for step in run.all(events.Step)):
        where = run.all(events.Wrap)[0].where
        return slow("every parameter is used in each step", where, "find_unused_without_need")
