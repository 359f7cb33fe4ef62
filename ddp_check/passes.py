"""The passes over data in a run: which batches each gave, and which steps were taken with them."""

from dataclasses import dataclass, field


@dataclass
class Pass:
    """One pass of a process over a DataLoader. The first fields are those of its event."""

    number: int
    length: int | None  # of the data set
    iterable: bool
    distributed: bool  # has a DistributedSampler
    shuffle: bool
    drop_last: bool
    tensors: int  # checksum of the whole data set, if it is a TensorDataset
    data: int  # checksum that equal data sets have in common
    where: str
    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    steps_beside: int = 0  # counted for another pass, which gave a later batch
    ended: bool = False

    @property
    def is_training(self):
        """Whether its batches were trained on, perhaps beside those of another pass."""
        return bool(self.steps) or self.steps_beside > 1

    def samples(self, key="indices"):
        """Return the indices of its samples, or None if they are not known."""
        if any(batch[key] is None for batch in self.batches):
            return None
        return [index for batch in self.batches for index in batch[key]]


@dataclass
class Reader:
    """Reads the events of one rank, in order."""

    passes: dict = field(default_factory=dict)  # by number
    fed: list = field(default_factory=list)  # gave a batch since the last step, the latest last

    def read(self, event):
        kind, known = event["kind"], self.passes.get(event.get("number"))
        if kind == "pass":
            values = {name: value for name, value in event.items() if name not in ("kind", "time")}
            self.passes[event["number"]] = Pass(**values)
        elif kind == "batch" and known:
            known.batches.append(event)
            self.fed = [one for one in self.fed if one is not known] + [known]
        elif kind == "end" and known:
            known.ended = True
        elif kind == "step" and self.passes:
            self.step(event)

    def step(self, event):
        """Count a step for the pass that gave the last batch, if possible one that goes on."""
        fed = [one for one in self.fed if not one.ended] or self.fed or [self.latest()]
        fed[-1].steps.append(event)
        for one in fed[:-1]:
            one.steps_beside += 1
        self.fed = []

    def latest(self):
        """Return the pass that was stepped with last: it may have fetched its batches ahead."""
        passes = list(self.passes.values())
        return next((one for one in reversed(passes) if one.steps), passes[-1])


def passes(run):
    """Return the passes of each rank."""
    found = {}
    for rank, events in run.ranks.items():
        reader = Reader()
        for event in events:
            reader.read(event)
        found[rank] = list(reader.passes.values())
    return found


def epochs(run):
    """Return for each epoch of training the pass of each rank: [{rank: pass}]."""
    columns = [[one for one in of if one.steps] for of in passes(run).values()]
    return [dict(zip(run.ranks, row)) for row in zip(*columns)]
