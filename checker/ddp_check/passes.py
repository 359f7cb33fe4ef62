"""The passes over the data: which batches each gave, and which steps used them."""

from dataclasses import field
from itertools import chain

from ddp_check import events


class Pass(events.PassBegun):  # a dataclass, as every subclass of Event becomes one
    """A pass of one rank over a DataLoader: how it began, and what followed."""

    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    shared_steps: int = 0  # how many in a row may have used its batches, but are another pass's
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
        # A validation that is left by a break may share one step, the first after it; see `credit`.
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

    An event that names a pass goes to that pass, and a step to those that gave batches for it, see
    `credit`. Any other goes to `events_after` of the pass that gave the last batch.
    """
    passes = {}  # by number
    recent = []  # passes with a batch since the last step, in the order of their last batches
    latest = None  # the pass that gave the last batch
    for event in events_of_rank:
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

    If none did, the batch was fetched ahead: then the candidate is the pass that took the step
    before, or else the newest. Of several candidates, the step goes to
    1. the last one that goes on and evaluates nothing,
    2. or else the last that goes on, 3. or else the last.
    The others share the step: of two loaders in one loop, one shares every step.

    Train, validate until a break, train: between the last step before the validation and the first
    one after it, both the validation and the second training pass give batches. The step is
    credited to the training pass, and is one of `shared_steps` of the validation.
    """
    training = [data_pass for data_pass in passes if data_pass.steps]
    training_lines = {data_pass.where for data_pass in training}

    def may_train(data_pass):
        """Return whether it goes on, or evaluates nothing, or its line has trained before."""
        return not (data_pass.ended and data_pass.evaluates) or data_pass.where in training_lines

    def preference(data_pass):
        """Return a larger number for a better candidate."""
        return 0 if data_pass.ended else 1 if data_pass.evaluates else 2

    gave_batch = list(filter(may_train, recent))
    candidates = gave_batch or training[-1:] or list(filter(may_train, passes[-1:]))
    if not candidates:
        return
    credited = max(reversed(candidates), key=preference)  # of equals, max returns the first
    credited.steps.append(step)
    sharing = {id(data_pass) for data_pass in candidates if data_pass is not credited}
    for data_pass in passes:
        if id(data_pass) in sharing:
            data_pass.shared_steps += 1
        elif gave_batch and not data_pass.is_training:  # not after the step of a second optimizer
            data_pass.shared_steps = 0
