"""What was observed in a run of the script."""

import os
import re
import signal
import textwrap
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, dropwhile, pairwise, takewhile
from pathlib import Path

from ddp_check import events
from ddp_check.passes import passes_in
from ddp_check.protocol import FRAME, own_frame
from ddp_check.ranks import of_lowest_rank

LACKS_GPUS = r"(?i)cuda|nccl|nvidia|\bgpu|accelerator"  # in an error message
# In an error that may only follow from what another rank did:
OF_OTHERS = r"(?i)gloo|nccl|connection|timed ?out|reduction|unpickl|\brank|\bpeer|\bstore"
FEW = 8  # numbers that ranks exchange: losses and counts, not parts of a model
PREFIX = r"(?:\[rank\d+\]: ?)?"  # that PyTorch puts before each line of a traceback
CHAINED = r"\s+(?:\[rank\d+\]:\s*)*(?:During handling of|The above exception was)"
# The last line of a traceback, or what an argument parser says; but see `ends_rank`:
ERROR = rf"^{PREFIX}([\w.]+(?:: .+)?|[\w.-]+: error: .+)$(?!{CHAINED})"
REPORT = r"^[EW]\d{4} .*torch/distributed"  # torchrun's, of a failure, and of which rank:
FIRST_FAILURE = r"Root Cause.*\n(?:.*\n)*?\s+rank\s+: (\d+).*\n\s+exitcode\s+: (-?\d+)"


def ends_rank(error):
    """Return whether a match of ERROR may have ended a rank.

    It ends a traceback, or an argument parser wrote it. Any other was printed, such as
    "Error: 0.52", or the reason why a library is not used.
    """
    if ": error: " in error[1]:
        return True
    frames, lines = [], lines_before(error)
    for line in lines:
        # Neither a frame nor a line of the box that "rich" draws, but "Traceback (most recent …".
        if not re.match(r"\s|╰", line):
            break
        frames.append(line)
    above = next(lines, "")  # that line
    if above.startswith("Exception ignored in"):  # it ends nobody
        return False
    if re.match(r"[\w.]*(Error|Exception)\b", error[1]):
        return bool(frames)  # or a box of "rich"
    return any(map(FRAME.match, frames))  # other names, such as StopIteration, need a frame


def lines_before(error):
    """Yield the lines of the same rank before an error, the latest first."""
    prefix, end = prefix_of(error), error.start()
    while end:
        begin = error.string.rfind("\n", 0, end - 1) + 1
        line = error.string[begin : end - 1]
        if line.startswith(prefix):
            yield line.removeprefix(prefix)
        end = begin


def prefix_of(error):
    """Return what PyTorch puts before each line of an error that nothing catches, or ""."""
    return re.match(PREFIX, error[0])[0]


def is_unwrapped(event):
    """Return whether an event is a step in an unwrapped model; a sharded one needs no wrapper."""
    if not isinstance(event, events.Step) or event.mesh_dimensions:
        return False
    return all(name.startswith(events.PARAMETER) for name in event.gradients)


def without_side_training(events_by_rank):
    """Return the events without the steps that are no part of the common training.

    Those are steps in an unwrapped model: before anything is wrapped, as in trials of
    hyperparameters, or by an optimizer that not every rank has, as for a teacher that rank 0
    trains. If no step is taken in a wrapped model, all count.
    """
    steps_by_rank = [
        [event for event in events_of_rank if isinstance(event, events.Step)]
        for events_of_rank in events_by_rank.values()
    ]
    if all(map(is_unwrapped, chain(*steps_by_rank))):
        return events_by_rank
    # An optimizer is known by the names of its parameters. Those that every rank has:
    optimizers = [{tuple(step.gradients) for step in steps} for steps in steps_by_rank]
    common = set.intersection(*optimizers)
    kept = {rank: [] for rank in events_by_rank}
    for rank, events_of_rank in events_by_rank.items():
        left_out, wraps = 0, False
        for event in events_of_rank:
            wraps = wraps or isinstance(event, events.Wrap)
            if is_unwrapped(event) and not (wraps and tuple(event.gradients) in common):
                left_out += 1
            elif left_out and hasattr(event, "steps"):  # it says how many came before it
                kept[rank].append(replace(event, steps=event.steps - left_out))
            else:
                kept[rank].append(event)
    return kept


@dataclass
class FaultyStep:
    """The first step in which something differs from rank to rank, or is not finite on one."""

    number: int  # of the step, from 1
    row: tuple  # the step of each rank
    name: str = ""  # of what differs, such as a parameter, or its position in a list


@dataclass
class Run:
    """A run of the script: its output, and the events that each rank has reported."""

    nproc: int
    folder: Path  # of the events
    cwd: Path = Path()
    script: str = ""  # its path
    text: str = ""  # of that file
    translate: bool = False  # its calls for GPUs were translated for the CPU
    returncode: int | None = None  # None: it was killed after the timeout
    seconds: float = 0
    begun: float = 0  # when it was started
    idle_ranks: set = field(default_factory=set)  # those that used no CPU time when it was killed
    output: str = ""
    own_steps: bool = False  # each rank has taken steps in a model of its own, which are left out
    # rank -> the events of its process, in order:
    events_by_rank: dict = field(default_factory=dict)
    stacks: dict = field(default_factory=dict)  # rank -> its frames when it hung, innermost first

    @property
    def world_size(self):
        """How many ranks have reported something."""
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
        """Return the events of a kind that each rank has, in their order: a tuple for each."""
        return list(zip(*self.by_rank(kind).values()))

    def following(self, event, kinds, until):
        """Return the events of these kinds after one of the lowest rank, until another kind."""
        after = dropwhile(lambda other: other is not event, of_lowest_rank(self.events_by_rank))
        before_next = takewhile(lambda other: not isinstance(other, until), [*after][1:])
        return [other for other in before_next if isinstance(other, kinds)]

    @cached_property
    def passes_by_rank(self):
        """The passes of each rank over its data: {rank: [pass]}."""
        return {rank: passes_in(of_rank) for rank, of_rank in self.events_by_rank.items()}

    @property
    def training_passes(self):
        """The passes that all ranks have trained on, in their order: [{rank: pass}]."""
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
    def draws_numbers(self):
        """Whether random numbers are drawn between steps, not only when a pass begins."""
        changes = sum(old.rng != new.rng for old, new in pairwise(self.steps))
        return changes > len(of_lowest_rank(self.passes_by_rank))

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
        """Whether a step was taken inside of join(), where some ranks run out before others."""
        return any(step.in_join for step in self.all(events.Step))

    @property
    def step_rows(self):
        """The steps that all ranks took: a tuple of their events for each.

        Without those in join(), where a rank may have none, and, in a run that failed, the last,
        which some ranks report and others do not.
        """
        rows = self.rows(events.Step)
        if self.returncode != 0:
            rows = rows[:-1]
        return list(takewhile(lambda row: not any(step.in_join for step in row), rows))

    def first_difference(self, field_name):
        """Return the first step in which a field differs from rank to rank, or None.

        A step has weights only now and then, and of one optimizer only: the latest of each name are
        compared. Other fields are whole in each step, so for them the latest are those of the step.
        """
        latest = [{} for _ in self.events_by_rank]  # {name: value}; of a list, {position: value}
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
        rows = self.rows(events.Step)  # also the last: it may be why the run failed
        for number, row in enumerate(rows, 1):
            if any(step.infinite for step in row):
                return FaultyStep(number, row)
        return None

    @cached_property
    def goes_another_way(self):
        """Whether the ranks exchange something else than DDP's gradients, or only one trains."""
        if any("localsgd" in event.name.lower() for event in self.all(events.CommHook)):
            return True
        calls = [call for call in self.all(events.Collective) if not call.in_model]
        training = [steps for steps in self.by_rank(events.Step).values() if steps]
        exchanges = any(call.elements > FEW or "object" in call.name for call in calls)
        return not self.all(events.Wrap) and (exchanges or len(training) == 1)

    @property
    def final_weights(self):
        """Checksums of the final weights of each rank's models, or nothing if a rank has none."""
        weights = {
            rank: [event.weights for event in ends]
            for rank, ends in self.by_rank(events.Final).items()
        }
        return weights if all(weights.values()) else {}

    @property
    def hangs(self):
        """Whether all ranks stand still, for longer than is usual in this run."""
        stand_still = bool(self.stacks) and self.idle_ranks >= self.stacks.keys()
        if self.returncode is not None or not stand_still:
            return False
        times = [self.begun, *sorted(event.time for event in self.all(events.Event))]
        longest = max((after - before for before, after in pairwise(times)), default=0)
        nothing_since = self.begun + self.seconds - times[-1]
        if nothing_since <= 2 * longest:  # as before; `wait` asks only after HANGS_AFTER seconds
            return False
        # In no process group, or at the network, a rank does not wait for another:
        frames = list(chain(*self.stacks.values()))
        joining = any(function == "init_process_group" for _, _, function in frames)
        outside = r"/(socket|ssl|subprocess)\.py$"  # it waits for the network, or a download
        for_network = any(re.search(outside, path) for path, _, _ in frames)
        return bool(self.joins or joining) and not for_network

    @cached_property
    def files(self):
        """The texts of the script's files that have run: {path: text}, the script itself first."""
        paths = {event.where.rpartition(":")[0] for event in self.all(events.Event)}
        paths |= {path for event in self.all(events.Exit) for path in event.modules}
        inside = [path for path in sorted(paths) if not os.path.isabs(path)]
        own = [path for path in inside if (self.cwd / path).is_file()]
        texts = {path: (self.cwd / path).read_text("utf-8", "replace") for path in own}
        return {self.script: self.text, **texts}

    @property
    def source(self):
        """The texts of all these files."""
        return "\n".join(self.files.values())

    @property
    def printed(self):
        """The output without the launcher's report of a failure."""
        return re.split(REPORT, self.output, maxsplit=1, flags=re.M)[0]

    @cached_property
    def raised(self):
        """The matches of the errors that may have ended ranks.

        ERROR leaves out those that others follow, `ends_rank` those that were only printed. Those
        that PyTorch has marked with their rank are preferred, as nothing has caught them.
        """
        errors = list(filter(ends_rank, re.finditer(ERROR, self.printed, re.M)))
        return list(filter(prefix_of, errors)) or errors

    @property
    def error(self):
        """The match of the error that ended the first rank.

        One that is not about another rank is preferred. Of several errors of its rank, it is the
        last: the script has caught and printed the earlier ones.
        """
        own = [error for error in self.raised if not re.search(OF_OTHERS, error[1])]
        errors = own or self.raised
        of_rank = [error for error in errors if prefix_of(error) == prefix_of(errors[0])]
        return of_rank[-1] if of_rank else None

    @property
    def traceback(self):
        """The lines of the error's traceback, without those of other ranks."""
        first = self.error
        if not first:
            return []
        text = first.string[: first.end()].replace(f"{self.cwd}{os.sep}", "")
        prefix = prefix_of(first)
        lines = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
        starts = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
        if not starts:  # a SyntaxError has only a frame
            starts = [at for at, line in enumerate(lines) if FRAME.match(line)]
        return lines[starts[-1] :] if starts else []

    @property
    def error_where(self):
        """The innermost line of the script in the error's traceback, as "path:line"."""
        return next(filter(None, map(own_frame, reversed(self.traceback))), "")

    @property
    def fails_in_an_import(self):
        """Whether the error is that of a library while the script imports it."""
        # Here, the script's innermost statement is `import timm`; the error comes from below it:
        #   File "train.py", line 7, in <module>
        #     import timm
        #   File "/usr/lib/python3/site-packages/timm/__init__.py", line 1, in <module>
        frames = [at for at, line in enumerate(self.traceback) if FRAME.match(line)]
        own = [at for at in frames if own_frame(self.traceback[at])]
        statement = self.traceback[own[-1] + 1] if own and own[-1] != frames[-1] else ""
        return bool(re.match(r"\s*(import|from)\s", statement))

    @property
    def ending(self):
        """How a script that failed has ended, in words; not for one killed after the timeout."""
        if first := self.error:
            text = first[1]
            next_line = re.match(rf"\s*{PREFIX}\s*(\S.*)", first.string[first.end() :])
            if next_line and text.endswith((":", " ")):  # the message goes on there
                text = f"{text.rstrip()} {next_line[1]}"
            usage = re.findall(r"^usage: .+", self.printed, re.M)
            return textwrap.shorten("; ".join([text, *usage[:1]]), 500, placeholder=" …")
        rank, code = self.first_failure
        who = f"rank {rank}" if rank is not None else "it"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"{who} is killed by {names.get(-code, f'signal {-code}')}"
        last = self.printed.strip().rpartition("\n")[2] or "nothing is printed"
        return f"{who} exits with code {code}: {last}"

    @property
    def first_failure(self):
        """The rank that failed first, or None if the launcher does not say, and its returncode."""
        match = re.search(FIRST_FAILURE, self.output)
        return (int(match[1]), int(match[2])) if match else (None, self.returncode)

    @property
    def lacks_gpus(self):
        """Whether the script failed because there are none."""
        if not self.returncode:  # it has not failed
            return False
        # Without a message, only what is asserted says it. A traceback ends with the frame,
        # "assert torch.cuda.is_available()", and "AssertionError".
        end = self.traceback[-3:] if self.ending == "AssertionError" else []
        return bool(re.search(LACKS_GPUS, "\n".join([self.ending, *end])))
