"""The passes over the data: which batches each gave, and which steps used them."""

from dataclasses import field
from itertools import chain

from ddp_check import events


class Pass(events.PassBegun):
    """A pass of one rank over a DataLoader: how it began, and what followed."""

    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    steps_beside: int = 0  # credited to another pass, which gave a later batch
    ended: bool = False
    evaluates: bool = False  # a model was called without gradients
    after: list = field(default_factory=list)  # events that follow one of its batches

    @property
    def dataset(self):
        """What is equal for passes over equal data sets."""
        return self.dataset_checksum, self.subset_checksum

    @property
    def is_training(self):
        """Whether its batches were trained on, perhaps together with those of another pass."""
        return bool(self.steps) or self.steps_beside > 1  # once is a validation in between

    def events_of(self, kind):
        """Return the events of a kind that follow one of its batches."""
        return [event for event in self.after if isinstance(event, kind)]

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
    """Return the passes of one rank, whose events these are."""
    passes = {}  # by number
    fed = []  # passes with a batch since the last step
    latest = None  # the pass that gave the last batch
    for event in events_of_rank:
        entry = passes.get(getattr(event, "pass_number", None))
        match event:
            case events.PassBegun():
                passes[event.pass_number] = Pass(**vars(event))
            case events.Batch() if entry:
                entry.batches.append(event)
                latest = entry
                fed = [other for other in fed if other is not entry] + [entry]
            case events.PassEnded() if entry:
                entry.ended = True
            case events.Evaluated() if entry:
                entry.evaluates = True
            case events.Step():
                credit(event, fed, list(passes.values()))
                fed = []
            case _ if latest:
                latest.after.append(event)
    for entry in passes.values():
        evaluated = len(entry.events_of(events.BatchEvaluated))
        if evaluated and not (entry.ended or entry.is_training):  # it was left, perhaps by a break
            del entry.batches[evaluated:]  # which comes before the model is called
    return list(passes.values())


def credit(step, fed, passes):
    """Credit a step to the last of the passes that gave a batch since the step before (`fed`).

    One that goes on is preferred to one that has ended. If none gave a batch, it was fetched ahead:
    then the step belongs to the pass that took the step before, or to the newest.
    """
    training = [entry for entry in passes if entry.steps]
    training_lines = {entry.where for entry in training}

    def may_train(entry):  # an evaluation that has ended does not, unless its line trains
        return entry.where in training_lines or not (entry.ended and entry.evaluates)

    newest = passes[-1:]
    candidates = [*filter(may_train, fed)] or training[-1:] or [*filter(may_train, newest)]
    candidates = [entry for entry in candidates if not entry.ended] or candidates
    if candidates:
        *others, last = candidates
        last.steps.append(step)
        for entry in others:
            entry.steps_beside += 1
