"""Rules about weights, and the mode that a model is in."""

from itertools import chain

from ddp_check import events
from ddp_check.ranks import differing_ranks
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong
from ddp_check.rules.gradients import NOT_FINITE


def weights_agree(run):
    """all ranks wrap the same model, and end with the same weights"""
    wrapped, steps = run.all(events.Wrap), run.all(events.Step)
    if run.is_sharded:
        return not_applicable("the parameters are sharded")
    if not steps and not wrapped:
        return unseen("nothing was trained")
    if run.has_own_exchange and run.first_difference("gradients"):
        if run.first_difference("weights") or differing_ranks(run.final_weights):
            text = "the weights differ from rank to rank: are they averaged now and then?"
            return unsure(text, steps[0].where)
        return passed("the ranks average their weights", steps[0].where)
    if verdict := nothing_is_wrapped(run) or weights_differ(run):
        return verdict
    if run.first_infinite:
        return NOT_FINITE
    return passed("bit for bit", (wrapped or steps)[0].where)


def nothing_is_wrapped(run):
    """Return the verdict on ranks that train models of their own."""
    rows, calls = run.step_rows, run.of_lowest_rank(events.Collective)
    if run.all(events.Wrap) or (run.returncode != 0 and not rows):  # the first step failed
        return None
    if len(calls) >= len(rows) > 0 and not run.first_difference("gradients"):
        return None  # the script may average its gradients by hand
    text = "no model is wrapped in DistributedDataParallel: each rank trains its own"
    return wrong(text, run.all(events.Step)[0].where)


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
        # One rank may load its best weights on purpose after the last step, so this is `unsure`.
        return with_earlier_cause(run, len(run.step_rows) + 1, unsure, text)


def with_earlier_cause(run, number, say, text, where=""):
    """Return the verdict on weights that differ before the step with this number.

    The cause is the first of these that was seen: rates or gradients that differed in an earlier
    step, a state loaded after DDP had made the weights equal, or weights unequal from the start.
    """
    for field_name, words in {"rates": "learning rates", "gradients": "gradients"}.items():
        earlier = run.first_difference(field_name)
        if earlier and earlier.number < number:
            text += f"; it follows from the {words} in step {earlier.number}"
            return wrong(text, where, follows=True)
    rows, loads = run.step_rows, [load for load in run.all(events.StateLoaded) if load.wraps]
    if number <= len(rows):
        loads = [load for load in loads if load.time < rows[number - 1][0].time]
    if loads:
        text += ": does each rank load the same state here, and only when it is written?"
        return say(text, loads[-1].where, "missing_barrier")
    if number == 1 and not run.all(events.Wrap):
        text += "; broadcast them at the start, or seed all ranks alike"
        return say(text, where, "recipes/in_buckets")
    return say(f"{text}; were they edited?", where, "edit_on_one_rank")


def training_mode(run):
    """the model is in training mode in each step"""
    steps = run.of_lowest_rank(events.Step) or run.all(events.Step)  # rank 0 may take no step
    numbers = [number for number, step in enumerate(steps, 1) if not step.training]
    if len(numbers) == len(steps):
        return unsure("all steps are taken in evaluation mode", steps[0].where)
    if numbers:
        where, text = steps[numbers[0] - 1].where, f"step {numbers[0]} is in evaluation mode"
        return unsure(f"{text}: does train() follow eval()?", where, "eval_never_undone")


def evaluation_mode(run):
    """the model is in evaluation mode when it is evaluated"""
    all_passes = [*chain(*run.passes_by_rank.values())]
    trained = {data_pass.dataset for data_pass in all_passes if data_pass.is_training}
    evaluated = [
        event
        for data_pass in all_passes
        # A pass over training data without a step may compute BatchNorm's statistics (update_bn).
        if data_pass.dataset not in trained
        for event in data_pass.events_of(events.Evaluated)
    ]
    for event in evaluated:
        if event.noisy:
            text = f"it is in training mode: {event.noisy} changes what it returns"
            return wrong(text, event.where)
    if not evaluated:
        return unseen("no model that is trained is evaluated on other data from a DataLoader")
    if all(event.training for event in evaluated):
        return not_applicable("eval() is not called, and no layer of the model would change")
