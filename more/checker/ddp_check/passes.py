"""The passes over the data: which batches each pass gave, and which steps used them."""

from dataclasses import field
from itertools import chain

from ddp_check import events


class Pass(events.PassBegun):  # a dataclass, as every subclass of Event becomes one
    """A pass of one rank over a DataLoader: how it began, and what followed."""

    batches: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    ended: bool = False
    evaluates: bool = False  # whether a model was called without gradients
    events_after: list = field(default_factory=list)  # events that follow one of its batches

    @property
    def dataset(self):
        """A value that is equal for passes over equal data sets."""
        return self.dataset_checksum, self.subset_checksum

    @property
    def is_training(self):
        """Whether its batches were trained on."""
        return bool(self.steps)

    def events_of(self, kind):
        """Return the events of this kind that follow one of its batches."""
        return [event for event in self.events_after if isinstance(event, kind)]

    @property
    def is_whole(self):
        """Whether it returned all its batches."""
        return self.ended or len(self.batches) == self.batch_count

    def values(self, field_name):
        """Return this field of all its batches as one list, or None if one of them is unknown."""
        lists = [getattr(batch, field_name) for batch in self.batches]
        return None if None in lists else list(chain(*lists))


def passes_in(events_of_rank):
    """Return the passes of one rank over its data, with the steps that used their batches.

    `Batch` and `PassEnded` belong to the pass with their number, and a step belongs to all passes
    that gave a batch for it. Other events are `events_after` of the pass with the last batch.
    """
    passes = {}  # number -> pass
    recent = []  # passes that gave a batch since the last step, in the order of their last batches
    latest = None  # the pass that gave the last batch
    for event in events_of_rank:
        # The pass is None, too, if a process was forked during a pass and continues it:
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
                for data_pass in passes_of_step(recent, [*passes.values()]):
                    data_pass.steps.append(event)
                recent = []
            case _ if latest:
                latest.evaluates |= isinstance(event, events.BatchEvaluated)
                latest.events_after.append(event)
    return list(passes.values())


def passes_of_step(recent, passes):
    """Return the passes whose batches a step used: several if a loop reads two loaders at once.

    Evaluations since the previous step are left out. If no pass gave a batch since then, the batch
    was fetched ahead, by the pass that was trained on last, or otherwise by the newest pass.
    """
    recent = [each for each in recent if not is_peek(each, recent)]
    training = [each for each in recent if not each.ended and (each.steps or not each.evaluates)]
    trained = [each for each in passes if each.steps]
    return training or recent[-1:] or trained[-1:] or passes[-1:]


def is_peek(data_pass, recent):
    """Return whether a pass only looked at a batch before another one over the same data began."""
    later = [each for each in recent if each.time > data_pass.batches[0].time]
    return len(data_pass.batches) == 1 and data_pass.dataset in [each.dataset for each in later]
