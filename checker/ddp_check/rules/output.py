"""Rules about what is printed, written and loaded."""

import re
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

from ddp_check import events
from ddp_check.numbers import close
from ddp_check.ranks import counted, differing_ranks, of_lowest_rank
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, wrong

FRACTION = r"-?\d+\.(\d+)(?!\.?\d)(?:e[+-]?\d+)?"  # but not a version, such as 2.8.0
LOSS = r"(?i)(loss|nll|perplexity|\bppl)\w*[^\w\n]{0,12}$"  # before a number
RIGHT, THE_SUM = "the mean over all ranks", "the sum over the ranks"  # what a number may be
WAITS = events.Step | events.Collective
WRITES = events.Written | events.Save
NAMED_SUM = r"(?i)sum|total"
SAYS_RANK = r"(?i)\brank[ _-]?\d"  # so the line says whose number it is
# In a script that may wait for a file in a way of its own:
POLLS = r"\bsleep\(|\.wait\(|(?i:file_?lock)|flock\("


def one_rank_prints(run):
    """one rank prints the progress, or each with its number"""
    texts_by_line = {}  # line of the script -> rank -> what it prints
    for rank, printed in run.by_rank(events.Print).items():
        for event in printed:
            texts_by_line.setdefault(event.where, {}).setdefault(rank, []).append(event.text)
    for where, texts_by_rank in texts_by_line.items():
        rows = [
            [number == str(rank) for number in re.findall(r"\d+", text)]
            for rank, texts in texts_by_rank.items()
            for text in texts
        ]
        tells_its_rank = any(map(all, zip(*rows)))  # at the same place in each line
        # Lines that all ranks print, but for the numbers in them:
        common = set.intersection(*(set(map(pattern, texts)) for texts in texts_by_rank.values()))
        if len(texts_by_rank) > 1 and not tells_its_rank and common:
            texts = chain(*texts_by_rank.values())
            example = next(text for text in texts if pattern(text) in common)
            ranks = " and ".join(map(str, texts_by_rank))
            text = f'ranks {ranks} print "{example.strip()[:60]}": is that intended?'
            return unsure(text, where, "prints_on_every_rank")


def pattern(text):
    """Return a line without its numbers, which may differ from rank to rank."""
    return re.sub(r"[\d.,]+", "#", text)


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writes = file_uses(run, WRITES)
    if verdict := written_by_several(run, writes) or read_too_early(run, writes):
        return verdict
    saves = {event.path: event.where for event in run.all(events.Save) if event.path}
    renamed = {event.old_name for event in run.all(events.Written)}
    for path, where in saves.items():
        if path not in renamed:
            text = f"{Path(path).name} is written in place: a crash then leaves half a file"
            return fragile(text, where, "written_in_place")
    if not writes:
        return unseen("no file of the script's folder is written, or lines are only appended to it")
    return passed(counted(len(writes), "file"), next(iter(saves.values()), ""))


class Use(NamedTuple):
    """A file is written, renamed, opened or read."""

    rank: int
    waits: int  # how often its rank has waited for the others before
    steps: int  # that were taken before
    where: str


def file_uses(run, kinds):
    """Return the uses of each file: {path: [use]}."""
    uses = {}
    for rank, found in run.events_by_rank.items():
        waits = steps = 0
        for event in found:
            steps += isinstance(event, events.Step)
            waits += isinstance(event, WAITS)
            if isinstance(event, kinds) and event.path:
                uses.setdefault(event.path, []).append(Use(rank, waits, steps, event.where))
    return uses


def read_too_early(run, writes_by_path):
    """Return the verdict on a file that a rank reads, perhaps before another one has written it."""
    for path, reads in file_uses(run, events.Read).items():
        for read, write in product(reads, writes_by_path.get(path, ())):
            if read.rank != write.rank and read.waits == write.waits:  # neither waits in between
                text = f"rank {read.rank} reads {Path(path).name}, which rank {write.rank} writes, "
                text += "and nothing makes it wait until it is written: put a barrier between"
                verdict = unsure if re.search(POLLS, run.source) else wrong
                return verdict(text, read.where)


def written_by_several(run, writes_by_path):
    """Return the verdict if several ranks write the same file: at once, or at other times."""
    at_other_times = None
    for path, writes in writes_by_path.items():
        steps_by_rank = {}
        for write in writes:
            steps_by_rank.setdefault(write.rank, set()).add(write.steps)
        text = f"ranks {', '.join(map(str, steps_by_rank))} write {Path(path).name}"
        where = next(write.where for write in writes if write.rank == max(steps_by_rank))
        moments = {(write.rank, write.waits) for write in writes}
        if len({waits for _, waits in moments}) < len(moments):  # two ranks have one in common
            return wrong(f"{text} at the same time", where, "every_rank_saves")
        if run.returncode == 0 and differing_ranks(steps_by_rank) and not at_other_times:
            text += " after other steps: is that intended?"
            at_other_times = unsure(text, where, "every_rank_saves")
    return at_other_times


def plain_names(run):
    """no saved name begins with the prefix module."""
    names = {name for wrap in run.all(events.Wrap) for name in wrap.names}
    for event in run.all(events.Save):
        if prefixed := [key for key in event.keys if key not in names]:
            text = f"a key is {prefixed[0]}: only a wrapped model can load it"
            return fragile(text, event.where, "module_prefix_saved")


def safe_loads(run):
    """checkpoints are loaded with weights_only=True"""
    for event in run.all(events.Load):
        if not event.weights_only:
            return fragile("an untrusted file could run code", event.where, "weights_only_false")


def printed_loss_is_of_all(run):
    """a printed loss is that of all ranks"""
    if run.is_sharded and not any(step.inputs for step in run.all(events.Step)):
        return not_applicable("ranks that share a model have the same loss")
    if verdict := sum_is_printed(run, LOSS):
        return verdict
    numbers_by_place = {}
    for number in printed_numbers(run):
        numbers_by_place.setdefault((number.where, number.words), []).append(number)
    for numbers in numbers_by_place.values():
        if len(numbers) > 1 and all(number.is_fault for number in numbers):  # once may be chance
            first = numbers[0]
            text = f"{first.shown} is {first.meaning}"
            if THE_SUM in first.meaning and not re.search(NAMED_SUM, first.words):
                return wrong(text, first.where, "rank_0_loss")
            return unsure(text, first.where, "rank_0_loss")
    numbers = list(chain(*numbers_by_place.values()))
    own = [number.where for number in numbers if number.is_own_loss]
    if own and run.world_size > 1:
        text = "no collective comes before this loss: is it that of rank 0?"
        return unsure(text, own[0], "rank_0_loss")
    right = list(dict.fromkeys(number.where for number in numbers if number.meaning == RIGHT))
    if right:
        return passed(counted(len(right), "number"), right[0])
    return unseen("no printed number could be compared with the losses of the steps")


class Number(NamedTuple):
    """A number that rank 0 has printed after a step."""

    shown: str
    words: str  # before it, without other numbers
    where: str
    meaning: str | None  # `RIGHT`, or what it is instead, in words; None if that is not known
    is_own_loss: bool  # a loss, before which no collective has brought in the other ranks

    @property
    def is_fault(self):
        """Whether it is known to be something else than the loss of all ranks."""
        return self.meaning not in (None, RIGHT)


class Progress:
    """What rank 0 has done until it prints something."""

    def __init__(self, training_passes):
        self.training_passes = training_passes  # their numbers
        self.steps = 0
        self.steps_before_epoch = 0
        self.steps_at_reduction = None  # None: nothing was reduced yet
        self.samples_left = None  # to be seen in this pass; None: it trains

    def update(self, event):
        """Take notice of an event."""
        match event:
            case events.Step():
                self.steps += 1
                self.samples_left = None
            case events.Collective(in_model=False) if event.sums or "gather" in event.name:
                self.steps_at_reduction = self.steps
            case events.PassBegun():
                self.samples_left = event.sample_count
                if event.pass_number in self.training_passes:
                    self.steps_before_epoch = self.steps
            case events.Batch() if self.samples_left:
                self.samples_left -= len(event.indices or event.checksums or ())

    @property
    def is_alone(self):
        """Whether what it knows is its own: nothing is reduced, nor has it seen all samples."""
        if self.samples_left == 0:
            return False
        # A loss may be printed one step after it was reduced.
        return self.steps_at_reduction is None or self.steps > self.steps_at_reduction + 1


def printed_numbers(run):
    """Return the numbers that rank 0 prints after a step, in their order."""
    passes = of_lowest_rank(run.passes_by_rank)
    progress = Progress({entry.pass_number for entry in passes if entry.is_training})
    rows = list(zip(*run.by_rank(events.Step).values()))
    numbers = []
    for event in of_lowest_rank(run.events_by_rank):
        progress.update(event)
        if not isinstance(event, events.Print) or not progress.steps:
            continue
        until_now = rows[: progress.steps]
        windows = [until_now[-1:], until_now[progress.steps_before_epoch :], until_now]
        for match in re.finditer(FRACTION, event.text):
            words = event.text[: match.start()]
            meaning = meaning_of(match, windows)
            of_rank = meaning != RIGHT and bool(re.search(SAYS_RANK, words))
            meaning = None if of_rank else meaning
            is_own_loss = bool(re.search(LOSS, words)) and progress.is_alone and not of_rank
            numbers.append(Number(match[0], pattern(words), event.where, meaning, is_own_loss))
    return numbers


def sum_is_printed(run, words):
    """Return the verdict if rank 0 prints, after these words, a sum of what each rank has alone.

    It may be right: if each rank has divided its own part by a number of all.
    """
    sums = [*zip(*run.by_rank(events.Totalled).values())]
    row, ranks = (), run.world_size
    for event in of_lowest_rank(run.events_by_rank):
        match event:
            case events.Totalled():
                row, *sums = sums or [()]
            case events.Print() if row and ranks > 1 and is_sum_of_fractions(row):
                for number in re.finditer(FRACTION, event.text):
                    before, off = event.text[: number.start()], 0.51 * 10 ** -len(number[1])
                    factor = 100 if event.text[number.end() :].lstrip().startswith("%") else 1
                    if not re.search(words, before) or re.search(NAMED_SUM, before):
                        continue
                    if close(float(number[0]), factor * row[0].total, absolute=off):
                        return sum_of_each(row, number[0], factor, event.where)


def is_sum_of_fractions(row):
    """Return whether all ranks have added up one number each that is not whole."""
    own = [event.own for event in row]
    if None in own or row[0].total is None or all(value % 1 == 0 for value in own):
        return False
    return close(row[0].total, sum(own), 1e-4)


def sum_of_each(row, shown, factor, where):
    """Return the verdict on a printed sum, which is certain if shares add up to more than 1."""
    parts = " and ".join(f"{factor * event.own:.4g}" for event in row[:2])
    text = f"{shown} is {THE_SUM}, of {parts}"
    if all(0 <= event.own <= 1 for event in row) and row[0].total > 1:
        return wrong(f"{text}: divide it by {len(row)}", where, "rank_0_loss")
    return unsure(f"{text}: is each already divided by what all ranks have?", where, "rank_0_loss")


def meaning_of(match, windows):
    """Return what a printed number is: `RIGHT`, a fault in words, or None if that is not known.

    A window is a list of steps, each a tuple of the ranks' events, of which it may be the mean.
    """
    value, digits = float(match[0]), len(match[1])
    if digits < 3 or not value:
        return None
    rounding = 0.51 * 10**-digits
    meanings = [
        meaning
        for rows in windows
        for possible, meaning in possible_values(rows)
        if close(value, possible, absolute=rounding)
    ]
    return RIGHT if RIGHT in meanings else next(iter(meanings), None)


def possible_values(rows):
    """Yield what a number printed after these steps may be, and what that is in words."""
    if not all(step.losses for row in rows for step in row) or not rows or len(rows[0]) < 2:
        return
    ranks = len(rows[0])
    over_samples, over_batches = mean_over_samples(rows), mean_over_batches(rows)
    yield over_samples, RIGHT
    steps = [step for row in rows for step in row]
    divisors = [divisor for step in steps for divisor in step.divisors]
    divided = divisors and all(close(divisor, ranks) for divisor in divisors)
    if divided or any(step.loss_reduced for step in steps):
        return  # the losses that entered backward() are no means, which is another rule's subject
    rows_of_rank_0 = [row[:1] for row in rows]
    for value in (mean_over_samples(rows_of_rank_0), mean_over_batches(rows_of_rank_0)):
        yield value, f"the loss of rank 0, that of all ranks is {over_batches:.4g}"
    yield ranks * over_batches, f"{THE_SUM}, their mean is {over_batches:.4g}"
    text = f"a mean over batches of unequal size, over samples it is {over_samples:.4g}"
    yield over_batches, text
    yield over_samples / ranks, f"the mean over the ranks, {over_samples:.4g}, divided again"
    text = "the loss of rank 0 divided by the number of ranks, without those of the others"
    yield mean_over_samples(rows_of_rank_0) / ranks, text


def mean_over_batches(rows):
    """Return the mean of the losses in these steps, each of which counts once."""
    losses = [step.losses[-1] for row in rows for step in row]
    return sum(losses) / len(losses)


def mean_over_samples(rows):
    """Return the mean of the losses in these steps, weighted by samples if all are known."""
    steps = [step for row in rows for step in row]
    if not all(step.sample_count for step in steps):  # some are fetched ahead
        return mean_over_batches(rows)
    return sum(step.sample_count * step.losses[-1] for step in steps) / sum(
        step.sample_count for step in steps
    )
