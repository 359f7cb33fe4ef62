"""What was observed in a run of the script."""

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise, takewhile
from pathlib import Path

from ddp_check import events
from ddp_check.ending import Ending
from ddp_check.passes import passes_in
from ddp_check.ranks import of_lowest_rank

FEW = 8  # a collective with more elements than this exchanges weights, not losses or counts


def common_training(events_of_rank):
    """Return the events of a rank without the steps that it takes before it wraps a model.

    Such steps are not part of the common training: each rank may try something out, or rank 0 may
    train a teacher. If no step follows the wrap, all steps are kept.
    """
    wraps = [at for at, event in enumerate(events_of_rank) if isinstance(event, events.Wrap)]
    steps = [at for at, event in enumerate(events_of_rank) if isinstance(event, events.Step)]
    if not (wraps and steps and steps[-1] > wraps[0]):
        return events_of_rank
    before = {at for at in steps if at < wraps[0]}
    return [event for at, event in enumerate(events_of_rank) if at not in before]


@dataclass
class FaultyStep:
    """The first step in which something differs from rank to rank, or is not finite on one."""

    number: int  # number of the step, from 1
    row: tuple  # the `Step` event of each rank
    name: str = ""  # name of the value that differs, such as a parameter's, or its index in a list


@dataclass
class Run:
    """A run of the script: its output, and the events that each rank has reported."""

    nproc: int  # number of processes
    folder: Path  # folder of the events
    cwd: Path = Path()  # folder that the script ran in
    text: str = ""  # text of the script
    translate: bool = False  # whether its GPU calls were translated for the CPU
    returncode: int | None = None  # None if it was killed after the timeout
    seconds: float = 0  # number of seconds that it ran
    begun: float = 0  # time at which it was started
    idle_ranks: set = field(default_factory=set)  # ranks that used no CPU time when it was killed
    output: str = ""
    # rank -> the events of its process, in order:
    events_by_rank: dict = field(default_factory=dict)
    stacks: dict = field(default_factory=dict)  # rank -> its frames when it hung, innermost first

    @cached_property
    def end(self):
        """How it ended, as far as its output shows."""
        return Ending(self.output, self.cwd, self.returncode)

    @property
    def world_size(self):
        """The number of ranks that have reported something."""
        return len(self.events_by_rank)

    def by_rank(self, *kinds):
        """Return the events of these kinds: {rank: [event]}."""
        return {
            rank: [event for event in events_of_rank if isinstance(event, kinds)]
            for rank, events_of_rank in self.events_by_rank.items()
        }

    def of_lowest_rank(self, *kinds):
        """Return the events of these kinds from the lowest rank."""
        return of_lowest_rank(self.by_rank(*kinds))

    def all(self, *kinds):
        """Return the events of these kinds from all ranks, as one list."""
        return list(chain(*self.by_rank(*kinds).values()))

    def rows(self, kind):
        """Return the events of a kind in rows: the first ones of all ranks, their second ones, …"""
        return list(zip(*self.by_rank(kind).values()))

    @cached_property
    def passes_by_rank(self):
        """The passes of each rank over its data: {rank: [pass]}."""
        return {rank: passes_in(of_rank) for rank, of_rank in self.events_by_rank.items()}

    @property
    def training_passes(self):
        """The passes in which all ranks have trained, in order: [{rank: pass}]."""
        columns = [
            [data_pass for data_pass in passes if data_pass.is_training]
            for passes in self.passes_by_rank.values()
        ]
        return [dict(zip(self.events_by_rank, row)) for row in zip(*columns)]

    @property
    def steps(self):
        """The steps of the lowest rank."""
        return self.of_lowest_rank(events.Step)

    @property
    def sources_drawn(self):
        """The names of the random number generators used between steps, more than once per pass."""
        passes = len(of_lowest_rank(self.passes_by_rank))
        pairs = [*pairwise(self.steps)]
        sources = self.steps[0].rng if pairs else ()
        return [
            source
            for source in sources
            if sum(old.rng.get(source) != new.rng.get(source) for old, new in pairs) > passes
        ]

    @property
    def joins(self):
        """The `Join` event of each rank that has one."""
        return {rank: joins[0] for rank, joins in self.by_rank(events.Join).items() if joins}

    @property
    def is_sharded(self):
        """Whether the parameters of a model are sharded over the ranks."""
        return any(step.mesh_dimensions for step in self.all(events.Step))

    @property
    def in_join(self):
        """Whether a step was taken inside join(), where some ranks run out of data first."""
        return any(step.in_join for step in self.all(events.Step))

    @property
    def step_rows(self):
        """The steps that all ranks took, each as a tuple of the ranks' events.

        Steps in join() are left out, because a rank may take none there. The last step of a run
        that failed is left out, too, because some ranks report it and others do not.
        """
        rows = self.rows(events.Step)
        if self.returncode != 0:
            rows = rows[:-1]
        return list(takewhile(lambda row: not any(step.in_join for step in row), rows))

    def first_difference(self, field_name):
        """Return the first step in which a field differs from rank to rank, or None.

        Few steps report weights, and only those of one optimizer, so the latest value of each name
        is compared. Other fields are complete in each step, so only its own values are compared.
        """
        latest = [{} for _ in self.events_by_rank]  # {name: value}; for a list, {index: value}
        for number, row in enumerate(self.step_rows, 1):
            values = [getattr(step, field_name) for step in row]
            if None in values:
                continue
            for latest_of_rank, value in zip(latest, values):
                latest_of_rank.update(value if isinstance(value, dict) else enumerate(value))
            for name in dict.fromkeys(chain(*latest)):
                if any(of_rank.get(name) != latest[0].get(name) for of_rank in latest):
                    return FaultyStep(number, row, name)
        return None

    @property
    def first_infinite(self):
        """The first step with a number that is not finite, or None."""
        rows = self.rows(events.Step)  # including the last, in which the run may have failed
        for number, row in enumerate(rows, 1):
            if any(step.infinite for step in row):
                return FaultyStep(number, row)
        return None

    @cached_property
    def has_own_exchange(self):
        """Whether the ranks exchange something other than DDP's gradients, or only one trains."""
        if any("localsgd" in event.name.lower() for event in self.all(events.CommHook)):
            return True
        calls = [call for call in self.all(events.Collective) if not call.in_model]
        training = [steps for steps in self.by_rank(events.Step).values() if steps]
        exchanges = any(call.elements > FEW and "reduce" in call.name for call in calls)
        return not self.all(events.Wrap) and (exchanges or len(training) == 1)

    @property
    def final_weights(self):
        """Checksums of the final weights of each rank's models; empty if a rank reports none."""
        weights = {
            rank: [event.weights for event in ends]
            for rank, ends in self.by_rank(events.Final).items()
        }
        return weights if all(weights.values()) else {}

    @property
    def hangs(self):
        """Whether no rank makes progress, for longer than is usual in this run."""
        stand_still = bool(self.stacks) and self.idle_ranks >= self.stacks.keys()
        if self.returncode is not None or not stand_still:
            return False
        times = [self.begun, *sorted(event.time for event in self.all(events.Event))]
        longest = max((after - before for before, after in pairwise(times)), default=0)
        nothing_since = self.begun + self.seconds - times[-1]
        if nothing_since <= 2 * longest:  # there were pauses of about this length before
            return False
        # A rank outside a process group, or waiting for the network, does not wait for other ranks:
        frames = list(chain(*self.stacks.values()))
        joining = any(function == "init_process_group" for _, _, function in frames)
        outside = r"/(socket|ssl|subprocess)\.py$"  # files in which a rank waits for a download
        for_network = any(re.search(outside, path) for path, _, _ in frames)
        return bool(self.joins or joining) and not for_network

    @cached_property
    def source(self):
        """The texts of the script, and of those of its other files that have caused an event."""
        paths = {event.where.rpartition(":")[0] for event in self.all(events.Event)}
        own = [self.cwd / path for path in sorted(paths) if path and not os.path.isabs(path)]
        texts = [path.read_text("utf-8", "replace") for path in own if path.is_file()]
        return "\n".join([self.text, *texts])
