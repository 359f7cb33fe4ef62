"""The passes over the data in a run: which batches each gave, and which steps used them."""

from dataclasses import dataclass, field

from ddp_check import events


@dataclass
class Pass:
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

    def seen(self, kind):
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
        found = [getattr(batch, key) for batch in self.batches]
        return None if None in found else [value for of in found for value in of]


def passes_of(found):
    """Return the passes of one rank, whose events these are."""
    passes = {}  # by number
    fed = []  # passes with a batch since the last step
    given = None  # the pass that gave the last batch
    for event in found:
        known = passes.get(getattr(event, "number", None))
        match event:
            case events.PassBegun():
                passes[event.number] = Pass(event)
            case events.Batch() if known:
                known.batches.append(event)
                given = known
                fed = [one for one in fed if one is not known] + [known]
            case events.PassEnded() if known:
                known.ended = True
            case events.Evaluated() if known:
                known.evaluates = True
            case events.Step():
                credit(event, fed, list(passes.values()))
                fed = []
            case _ if given:
                given.after.append(event)
    for one in passes.values():
        looked = len(one.seen(events.Looked))
        if looked and not (one.ended or one.is_training):  # it may have fetched one more
            del one.batches[looked:]
    return list(passes.values())


def credit(step, fed, passes):
    """Credit a step to the pass that gave the last batch, preferably one that goes on.

    If there was none since the previous step, its batches may have been fetched ahead. A pass that
    only evaluates does not count.
    """
    known = [one for one in passes if one.steps]
    lines = {one.where for one in known}
    able = [one for one in passes if not (one.ended and one.evaluates) or one.where in lines]
    fed = [one for one in fed if one in able] or known[-1:]
    fed = fed or [one for one in passes[-1:] if one in able]
    fed = [one for one in fed if not one.ended] or fed
    for one in fed[-1:]:
        one.steps.append(step)
    for one in fed[:-1]:
        one.steps_beside += 1


def passes(run):
    """Return the passes of each rank: {rank: [pass]}."""
    return {rank: passes_of(found) for rank, found in run.ranks.items()}


def epochs(run):
    """Return the pass of each rank for each training epoch: [{rank: pass}]."""
    columns = [[one for one in of if one.steps] for of in passes(run).values()]
    return [dict(zip(run.ranks, row)) for row in zip(*columns)]
