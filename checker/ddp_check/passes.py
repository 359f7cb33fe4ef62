"""The passes over the data in a run: which batches each gave, and which steps used them."""

from dataclasses import dataclass, field

from ddp_check.events import Batch, Collective, Counted, Cut, PassBegun, PassEnded, Step


@dataclass
class Pass:
    """One pass of a process over a DataLoader."""

    begun: PassBegun
    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    steps_beside: int = 0  # credited to another pass, which gave a later batch
    ended: bool = False
    gathers: int = 0  # that follow one of its batches
    added_up: bool = False  # numbers are added up over the ranks after its batches, before a gather
    cuts: list = field(default_factory=list)  # made after a gather
    counted: set = field(default_factory=set)  # lengths of what is counted after a gather

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


@dataclass
class Reader:
    """Reads the events of one rank, in order."""

    passes: dict = field(default_factory=dict)  # by number
    fed: list = field(default_factory=list)  # passes with a batch since the last step
    given: Pass | None = None  # the pass that gave the last batch

    def read(self, event):
        known = self.passes.get(getattr(event, "number", None))
        match event:
            case PassBegun():
                self.passes[event.number] = Pass(event)
            case Batch() if known:
                known.batches.append(event)
                self.given = known
                self.fed = [one for one in self.fed if one is not known] + [known]
            case PassEnded() if known:
                known.ended = True
            case Collective() if self.given and not event.inside:
                self.given.added_up |= event.adds and not self.given.gathers
                self.given.gathers += "gather" in event.name
            case Cut() if self.given:
                self.given.cuts.append(event)
            case Counted() if self.given:
                self.given.counted.add(event.length)
            case Step() if self.passes:
                self.step(event)

    def step(self, event):
        """Credit a step to the pass that gave the last batch, preferably one that goes on."""
        fed = [one for one in self.fed if not one.ended] or self.fed or [self.latest()]
        fed[-1].steps.append(event)
        for one in fed[:-1]:
            one.steps_beside += 1
        self.fed = []

    def latest(self):
        """Return the pass of the previous step, whose batches may have been fetched ahead."""
        passes = list(self.passes.values())
        return next((one for one in reversed(passes) if one.steps), passes[-1])


def passes(run):
    """Return the passes of each rank: {rank: [pass]}."""
    found = {}
    for rank, events in run.ranks.items():
        reader = Reader()
        for event in events:
            reader.read(event)
        found[rank] = list(reader.passes.values())
    return found


def epochs(run):
    """Return the pass of each rank for each training epoch: [{rank: pass}]."""
    columns = [[one for one in of if one.steps] for of in passes(run).values()]
    return [dict(zip(run.ranks, row)) for row in zip(*columns)]
