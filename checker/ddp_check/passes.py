"""The passes over the data in a run: which batches each gave, and which steps used them."""

from dataclasses import dataclass, field

from ddp_check.events import Batch, Collective, Counted, PassBegun, PassEnded, Step, Totalled


@dataclass
class Pass:
    begun: PassBegun
    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    steps_beside: int = 0  # credited to another pass, which gave a later batch
    ended: bool = False
    gathers: int = 0  # that follow one of its batches
    added_up: bool = False  # numbers are added up over the ranks after its batches, before a gather
    totals: set = field(default_factory=set)  # whole numbers that were added up over the ranks
    counted: list = field(default_factory=list)  # what is counted after a gather

    def __getattr__(self, name):
        return getattr(self.begun, name)

    @property
    def is_training(self):
        """Whether its batches were trained on, perhaps together with those of another pass."""
        return bool(self.steps) or self.steps_beside > 1

    @property
    def is_whole(self):
        """Whether it gave all its batches."""
        return self.ended or len(self.batches) == self.total

    def samples(self, key="indices"):
        """Return what is known of each of its samples, or None if it is unknown."""
        found = [getattr(batch, key) for batch in self.batches]
        return None if None in found else [value for of in found for value in of]


def passes_of(events):
    """Return the passes of one rank, whose events these are."""
    passes = {}  # by number
    fed = []  # passes with a batch since the last step
    given = None  # the pass that gave the last batch
    for event in events:
        known = passes.get(getattr(event, "number", None))
        match event:
            case PassBegun():
                passes[event.number] = Pass(event)
            case Batch() if known:
                known.batches.append(event)
                given = known
                fed = [one for one in fed if one is not known] + [known]
            case PassEnded() if known:
                known.ended = True
            case Collective() if given and not event.inside:
                given.added_up |= event.adds and not given.gathers
                given.gathers += "gather" in event.name
            case Totalled() if given:
                given.totals.update(event.values)
            case Counted() if given:
                given.counted.append(event)
            case Step() if passes:
                credit(event, fed, list(passes.values()))
                fed = []
    return list(passes.values())


def credit(step, fed, passes):
    """Credit a step to the pass that gave the last batch, preferably one that goes on.

    If there was none since the previous step, its batches may have been fetched ahead.
    """
    if not fed:
        fed = [next((one for one in reversed(passes) if one.steps), passes[-1])]
    fed = [one for one in fed if not one.ended] or fed
    fed[-1].steps.append(step)
    for one in fed[:-1]:
        one.steps_beside += 1


def passes(run):
    """Return the passes of each rank: {rank: [pass]}."""
    return {rank: passes_of(events) for rank, events in run.ranks.items()}


def epochs(run):
    """Return the pass of each rank for each training epoch: [{rank: pass}]."""
    columns = [[one for one in of if one.steps] for of in passes(run).values()]
    return [dict(zip(run.ranks, row)) for row in zip(*columns)]
