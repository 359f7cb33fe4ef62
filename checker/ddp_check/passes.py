"""The passes over the data in a run: which batches each gave, and which steps used them."""

from dataclasses import dataclass, field


@dataclass
class Pass:
    """One pass of a process over a DataLoader. The first fields come from its event."""

    number: int
    length: int | None  # of the data set
    iterable: bool
    part: int  # checksum of the indices that a Subset keeps, or 0 for all of the data set
    distributed: bool  # has a DistributedSampler
    shuffle: bool
    drop_last: bool
    tensors: int  # checksum of the whole data set, if it is a TensorDataset
    data: int  # checksum, the same for equal data sets
    where: str
    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    steps_beside: int = 0  # credited to another pass, which gave a later batch
    ended: bool = False
    gathered: bool = False  # a gather follows one of its batches
    added_up: bool = False  # numbers are added up over the ranks after its batches, before a gather
    dropped: set = field(default_factory=set)  # sizes of what is cut off after a gather

    @property
    def is_training(self):
        """Whether its batches were trained on, perhaps together with those of another pass."""
        return bool(self.steps) or self.steps_beside > 1

    def samples(self, key="indices"):
        """Return the indices of its samples, or None if they are unknown."""
        if any(batch[key] is None for batch in self.batches):
            return None
        return [index for batch in self.batches for index in batch[key]]


@dataclass
class Reader:
    """Reads the events of one rank, in order."""

    passes: dict = field(default_factory=dict)  # by number
    fed: list = field(default_factory=list)  # passes with a batch since the last step
    given: Pass | None = None  # the pass that gave the last batch

    def read(self, event):
        kind, known = event["kind"], self.passes.get(event.get("number"))
        if kind == "pass":
            values = {name: value for name, value in event.items() if name not in ("kind", "time")}
            self.passes[event["number"]] = Pass(**values)
        elif kind == "batch" and known:
            known.batches.append(event)
            self.given = known
            self.fed = [one for one in self.fed if one is not known] + [known]
        elif kind == "end" and known:
            known.ended = True
        elif kind == "collective" and self.given:
            self.given.added_up |= event["adds"] and not self.given.gathered
            self.given.gathered |= "gather" in event["name"]
        elif kind == "slice" and self.given:
            self.given.dropped.add(event["dropped"])
        elif kind == "step" and self.passes:
            self.step(event)

    def step(self, event):
        """Credit a step to the pass that gave the last batch, preferably one that has not ended."""
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
