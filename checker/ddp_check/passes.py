"""The passes over the data: which batches each gave, and which steps used them."""

from dataclasses import field
from itertools import chain

from ddp_check import events


class Pass(events.PassBegun):  # a dataclass, as every subclass of Event becomes one
    """A pass of one rank over a DataLoader: how it began, and what followed."""

    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    shared_steps: int = 0  # in a row, for which it gave a batch too, but another got the credit
    ended: bool = False
    evaluates: bool = False  # a model was called without gradients
    events_after: list = field(default_factory=list)  # that follow one of its batches

    @property
    def dataset(self):
        """What is equal for passes over equal data sets."""
        return self.dataset_checksum, self.subset_checksum

    @property
    def is_training(self):
        """Whether its batches were trained on, perhaps together with those of another pass."""
        # One shared step may be the first after a validation that is left by a break: see `credit`.
        return bool(self.steps) or self.shared_steps > 1

    def events_of(self, kind):
        """Return the events of a kind that follow one of its batches."""
        return [event for event in self.events_after if isinstance(event, kind)]

    @property
    def sizes(self):
        """How many samples its batches have, as far as is known."""
        return [len(batch.indices or batch.checksums or ()) for batch in self.batches]

    @property
    def is_whole(self):
        """Whether it gave all its batches."""
        return self.ended or len(self.batches) == self.batch_count

    def values(self, field_name):
        """Return this field of all its batches as one list, or None if one of them is unknown."""
        lists = [getattr(batch, field_name) for batch in self.batches]
        return None if None in lists else list(chain(*lists))


def passes_in(events_of_rank):
    """Return the passes of one rank over its data, with the steps that used their batches.

    A batch, or an end, goes to the pass that it names, and a step to one that gave a batch for it,
    see `credit`. Any other event goes to `events_after` of the pass that gave the last batch.
    """
    passes = {}  # by number
    recent = []  # passes with a batch since the last step, in the order of their last batches
    latest = None  # the pass that gave the last batch
    for event in events_of_rank:
        # None, too, where a process goes on with a pass that began before it was forked:
        data_pass = passes.get(getattr(event, "pass_number", None))
        match event:
            case events.PassBegun():
                passes[event.pass_number] = Pass(**vars(event))
            case events.Batch() if data_pass:
                data_pass.batches.append(event)
                recent = [other for other in recent if other is not data_pass] + [data_pass]
                latest = data_pass
            case events.PassEnded() if data_pass:
                data_pass.ended = True
            case events.Step():
                credit(event, recent, list(passes.values()))
                recent = []
            case _ if latest:
                latest.evaluates |= isinstance(event, events.BatchEvaluated)
                latest.events_after.append(event)
    for data_pass in passes.values():
        drop_unused_batches(data_pass)
    return list(passes.values())


def drop_unused_batches(data_pass):
    """Drop the batches of an evaluation that no model was called with.

    A loop that is left by a break may have got one more than it used.
    """
    evaluated = len(data_pass.events_of(events.BatchEvaluated))
    if evaluated and not (data_pass.ended or data_pass.is_training):
        del data_pass.batches[evaluated:]


def credit(step, recent, passes):
    """Credit a step to one of the passes that gave a batch since the step before (`recent`).

    Of several, `preference` decides, and the others share the step. If none did, the batch was
    fetched ahead: by the newest pass that has trained before, or else by the newest of all.

        batches of                                     credited to   shared by
        training 1                                     training 1
        a validation left by a break, then training 2  training 2    the validation: 1 in a row
        training 2                                     training 2    none: 0 in a row again

        inputs, then targets, of two loaders           targets       inputs: 1 in a row
        inputs, then targets                           targets       inputs: 2, so they train, too
    """
    trained = [data_pass for data_pass in passes if data_pass.steps]
    lines = {data_pass.where for data_pass in trained}
    candidates = [data_pass for data_pass in recent if may_train(data_pass, lines)]
    if not candidates:
        fetched_by = trained or [each for each in passes[-1:] if may_train(each, lines)]
        if fetched_by:
            fetched_by[-1].steps.append(step)
        return
    credited = max(reversed(candidates), key=preference)  # of equals, max returns the first
    credited.steps.append(step)
    numbers = {data_pass.pass_number for data_pass in candidates}
    for each in passes:
        if not each.is_training:  # once it is, it stays so
            each.shared_steps = each.shared_steps + 1 if each.pass_number in numbers else 0


def may_train(data_pass, lines):
    """Return whether a pass is no evaluation that is over, or its line is one that has trained."""
    # A training loop may also evaluate, and be over before the step with its last batch.
    return not (data_pass.ended and data_pass.evaluates) or data_pass.where in lines


def preference(data_pass):
    """Return a larger number for a better candidate: one that goes on, and evaluates nothing."""
    return 0 if data_pass.ended else 1 if data_pass.evaluates else 2
