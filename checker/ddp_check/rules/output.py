"""Rules about what is printed, written and loaded."""

import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ddp_check import events
from ddp_check.numbers import close
from ddp_check.ranks import counted, differing_ranks, of_lowest_rank
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, wrong

FRACTION = r"-?\d+\.(\d+)(?!\.?\d)(?:e[+-]?\d+)?"
LOSS = r"(?i)(loss|nll|perplexity|\bppl)\w*[^\w\n]{0,12}$"  # before a number
THE_SUM = "the sum over the ranks"
WAITS = events.Step | events.Collective | events.Received
WRITES = events.Opened | events.Save | events.Renamed


def one_rank_prints(run):
    """one rank prints the progress, or each with its number"""
    texts_by_line = {}  # line of the script -> rank -> what it prints
    for rank, printed in run.by_rank(events.Print).items():
        for event in printed:
            texts_by_line.setdefault(event.where, {}).setdefault(rank, []).append(event.text)
    for where, texts_by_rank in texts_by_line.items():
        pairs = [(str(rank), text) for rank, texts in texts_by_rank.items() for text in texts]
        numbered = all(rank in re.findall(r"\d+", text) for rank, text in pairs)
        patterns = [{pattern(text) for text in texts} for texts in texts_by_rank.values()]
        common = set.intersection(*patterns)
        if len(texts_by_rank) > 1 and not numbered and common:
            example = next(text for _, text in pairs if pattern(text) in common)
            ranks = " and ".join(map(str, texts_by_rank))
            text = f'ranks {ranks} print "{example.strip()[:60]}": is that intended?'
            return unsure(text, where, "prints_on_every_rank")


def pattern(text):
    """Return a line without its numbers, which may differ from rank to rank."""
    return re.sub(r"[\d.,]+", "#", text)


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writes = file_writes(run)
    if verdict := written_by_several(run, writes):
        return verdict
    saves = {event.path: event.where for event in run.all(events.Save) if event.path}
    renamed = {event.source for event in run.all(events.Renamed)}
    for path, where in saves.items():
        if path not in renamed:
            text = f"{Path(path).name} is written in place: a crash then leaves half a file"
            return fragile(text, where, "written_in_place")
    if not writes:
        return unseen("no file of the script's folder is written, or lines are only appended to it")
    return passed(counted(len(writes), "file"), next(iter(saves.values()), ""))


def file_writes(run):
    """Return who writes what: {path: {rank: {how often it has waited: (steps before, line)}}}."""
    writes = {}
    for rank, found in run.events_by_rank.items():
        waited = steps = 0
        for event in found:
            steps += isinstance(event, events.Step)
            waited += isinstance(event, WAITS)
            if isinstance(event, WRITES) and event.path and not getattr(event, "append", False):
                by_rank = writes.setdefault(event.path, {})
                by_rank.setdefault(rank, {})[waited] = steps, event.where
    return writes


def written_by_several(run, writes):
    """Return the verdict if several ranks write the same file: at once, or at other times."""
    at_other_times = None
    for path, by_rank in writes.items():
        text = f"ranks {', '.join(map(str, by_rank))} write {Path(path).name}"
        _, where = next(iter(by_rank[max(by_rank)].values()))
        if len(set(chain(*by_rank.values()))) < sum(map(len, by_rank.values())):
            return wrong(f"{text} at the same time", where, "every_rank_saves")
        steps = {rank: {taken for taken, _ in by_rank[rank].values()} for rank in by_rank}
        if run.returncode == 0 and differing_ranks(steps) and not at_other_times:
            text += " after other steps: is that intended?"
            at_other_times = unsure(text, where, "every_rank_saves")
    return at_other_times


def plain_names(run):
    """saved names do not begin with module."""
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
    places = printed_numbers(run)
    for (where, _), numbers in places.items():
        if len(numbers) > 1 and all(number.fault for number in numbers):  # once may be chance
            first = numbers[0]
            is_sum = THE_SUM in first.fault and not first.named_sum
            return (wrong if is_sum else unsure)(first.fault, where, "rank_0_loss")
    alone = [
        where for (where, _), numbers in places.items() if any(number.alone for number in numbers)
    ]
    if alone and len(run.events_by_rank) > 1:
        text = "no collective comes before this loss: is it that of rank 0?"
        return unsure(text, alone[0], "rank_0_loss")
    right = [
        where
        for (where, _), numbers in places.items()
        if any(number.fault == "" for number in numbers)
    ]
    if right:
        return passed(counted(len(right), "number"), right[0])
    return unseen("no printed number could be compared with the losses of the steps")


class Number(NamedTuple):
    """What is said of a number that rank 0 has printed."""

    fault: str | None  # "" if it is right, None if that is not known
    named_sum: bool  # by the words before it
    alone: bool  # a loss that no collective came before


def printed_numbers(run):
    """Return what is said of the numbers that rank 0 prints after a step: {place: [number]}.

    A place is a line of the script, and the words before the number.
    """
    steps = list(run.by_rank(events.Step).values())
    begun = taken = 0  # steps before this epoch, and until now
    summed = -2  # steps before something was reduced last: a loss may be printed a step later
    training = {entry.number for entry in of_lowest_rank(run.passes_by_rank) if entry.is_training}
    left = None  # samples that an evaluation has still to see
    places = {}
    for event in of_lowest_rank(run.events_by_rank):
        match event:
            case events.Step():
                taken, left = taken + 1, None
            case events.Collective(in_model=False) if event.sums or "gather" in event.name:
                summed = taken
            case events.PassBegun():
                begun, left = taken if event.number in training else begun, event.length
            case events.Batch() if left:
                left -= len(event.indices or event.samples or ())
            case events.Print() if taken:
                rows = list(zip(*(of_rank[:taken] for of_rank in steps)))
                for match in re.finditer(FRACTION, event.text):
                    words = event.text[: match.start()]
                    fault = fault_of(match, [rows[-1:], rows[begun:], rows])
                    is_loss = bool(re.search(LOSS, words))
                    alone = is_loss and taken >= summed + 2 and left != 0
                    named_sum = bool(re.search("(?i)sum|total", words))
                    number = Number(fault, named_sum, alone)
                    places.setdefault((event.where, pattern(words)), []).append(number)
    return places


def fault_of(match, windows):
    """Return what is wrong with a printed number: "" if it is right, None if that is not known.

    A window is a list of steps, each a tuple of the ranks' events, of which it may be the mean.
    """
    value, digits = float(match[0]), len(match[1])
    if digits < 3 or not value:
        return None
    off = 0.51 * 10**-digits
    texts = [
        text
        for rows in windows
        for meaning, text in meanings_of(rows)
        if close(value, meaning, absolute=off)
    ]
    if not texts:
        return None
    return "" if "" in texts else f"{match[0]} is {texts[0]}"


def meanings_of(rows):
    """Yield what a printed number may be, and, unless that is right, what it is in words."""
    if not all(step.losses for row in rows for step in row) or not rows or len(rows[0]) < 2:
        return
    right, of_all, of_rank_0 = mean(rows), mean(rows, False), [row[:1] for row in rows]
    yield right, ""
    divided = all(close(by, len(rows[0])) for row in rows for step in row for by in step.divisors)
    if divided and any(step.divisors for row in rows for step in row):
        return  # the losses that entered backward() were divided, another rule's subject
    for value in (mean(of_rank_0), mean(of_rank_0, False)):
        yield value, f"the loss of rank 0, that of all ranks is {of_all:.4g}"
    yield len(rows[0]) * of_all, f"{THE_SUM}, their mean is {of_all:.4g}"
    yield of_all, f"a mean over batches of unequal size, over samples it is {right:.4g}"


def mean(rows, weighted=True):
    """Return the mean of the losses in these steps, weighted by samples if all are known."""
    steps = [step for row in rows for step in row]
    weighted &= all(step.samples for step in steps)  # else some are fetched ahead
    counts = [step.samples if weighted else 1 for step in steps]
    return sum(n * step.losses[-1] for n, step in zip(counts, steps)) / sum(counts)
