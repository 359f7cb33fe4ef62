"""The passes over the data: which batches each gave, and which steps used them."""

from dataclasses import dataclass, field

from ddp_check import events


@dataclass
class Pass:
    """A pass of one rank over a DataLoader."""

    begun: events.PassBegun
    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    steps_beside: int = 0  # credited to another pass, which gave a later batch
    ended: bool = False
    evaluates: bool = False  # a model was called without gradients
    after: list = field(default_factory=list)  # events that follow one of its batches

    def __getattr__(self, name):
        return getattr(self.begun, name)

    @property
    def is_training(self):
        """Whether its batches were trained on, perhaps together with those of another pass."""
        return bool(self.steps) or self.steps_beside > 1

    def events_of(self, kind):
        """Return the events of a kind that follow one of its batches."""
        return [event for event in self.after if isinstance(event, kind)]

    @property
    def sizes(self):
        """How many samples its batches have, as far as is known."""
        return [len(batch.indices or batch.samples or ()) for batch in self.batches]

    @property
    def is_whole(self):
        """Whether it gave all its batches."""
        return self.ended or len(self.batches) == self.total

    def samples(self, key="indices"):
        """Return what is known of each of its samples, or None if it is unknown."""
        parts = [getattr(batch, key) for batch in self.batches]
        return None if None in parts else [value for part in parts for value in part]


def passes_in(found):
    """Return the passes of one rank, whose events these are."""
    passes = {}  # by number
    fed = []  # passes with a batch since the last step
    latest = None  # the pass that gave the last batch
    for event in found:
        entry = passes.get(getattr(event, "number", None))
        match event:
            case events.PassBegun():
                passes[event.number] = Pass(event)
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
        looked = len(entry.events_of(events.Looked))
        if looked and not (entry.ended or entry.is_training):  # it may have fetched one more
            del entry.batches[looked:]
    return list(passes.values())


def credit(step, fed, passes):
    """Credit a step to the pass that gave the last batch, preferably one that goes on."""
    training = [entry for entry in passes if entry.steps]
    lines = {entry.where for entry in training}
    # Not to one that only evaluates. If none gave a batch since the previous step, it was fetched
    # ahead.
    may_train = [
        entry for entry in passes if not (entry.ended and entry.evaluates) or entry.where in lines
    ]
    fed = [entry for entry in fed if entry in may_train] or training[-1:]
    fed = fed or [entry for entry in passes[-1:] if entry in may_train]
    fed = [entry for entry in fed if not entry.ended] or fed
    for entry in fed[-1:]:
        entry.steps.append(step)
    for entry in fed[:-1]:
        entry.steps_beside += 1
