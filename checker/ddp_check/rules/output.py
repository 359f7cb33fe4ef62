"""Rules about what is printed, written and loaded."""

import re
from itertools import chain
from pathlib import Path

from ddp_check import events
from ddp_check.ranks import differ, lowest
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, wrong

FRACTION = r"-?\d+\.(\d+)(?!\.?\d)(?:e[+-]?\d+)?"
ACCURACY = r"(?i)(?<!train )\bacc[a-z]*\W*(\d+\.(\d+)) ?(%?)"
WAITS = events.Step | events.Collective | events.Received
WRITES = events.Opened | events.Save | events.Renamed


def one_rank_prints(run):
    """one rank prints the progress, or each with its number"""
    places = {}  # line of the script -> rank -> what it prints
    for rank, found in run.by_rank(events.Print).items():
        for event in found:
            places.setdefault(event.where, {}).setdefault(rank, []).append(event.text)
    for where, texts in places.items():
        every = [(str(rank), text) for rank, of in texts.items() for text in of]
        its_own = all(rank in re.findall(r"\d+", text) for rank, text in every)
        patterns = [{re.sub(r"[\d.,]+", "#", text) for text in of} for of in texts.values()]
        if len(texts) > 1 and not its_own and (common := set.intersection(*patterns)):
            text = f'ranks {" and ".join(map(str, texts))} print "{min(common)}"'
            yield unsure(f"{text}: is that intended?", where, "prints_on_every_rank")


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writes = {}  # file -> rank -> how often it has waited -> steps it has taken, and the line
    for rank, found in run.events_by_rank.items():
        waited = steps = 0
        for event in found:
            steps += isinstance(event, events.Step)
            waited += isinstance(event, WAITS)
            if isinstance(event, WRITES) and event.path and not getattr(event, "append", False):
                writes.setdefault(event.path, {}).setdefault(rank, {})[waited] = steps, event.where
    together, apart = [], []
    for path, of in writes.items():
        text = f"ranks {', '.join(map(str, of))} write {Path(path).name}"
        _, where = next(iter(of[max(of)].values()))
        if len(set(chain(*of.values()))) < sum(map(len, of.values())):  # no rank waits between
            together.append(wrong(text, where, "every_rank_saves"))
        elif run.returncode == 0 and differ({rank: {*dict(of[rank].values())} for rank in of}):
            text += " after other steps: is that intended?"
            apart.append(unsure(text, where, "every_rank_saves"))
    yield from together + apart
    saved = {event.path: event.where for event in run.all(events.Save) if event.path}
    renamed = {event.source for event in run.all(events.Renamed)}
    for path, where in saved.items():
        if path not in renamed:
            text = f"{Path(path).name} is written in place: a crash then leaves half a file"
            yield fragile(text, where, "written_in_place")
    if not writes:
        yield unseen("no file of the script's folder is written, or only lines are appended to it")
    yield passed(f"{len(writes)} files", next(iter(saved.values()), ""))


def plain_names(run):
    """saved names do not begin with module."""
    own = {name for wrap in run.all(events.Wrap) for name in wrap.names}
    for event in run.all(events.Save):
        if prefixed := [key for key in event.keys if key not in own]:
            text = f"a key is {prefixed[0]}: only a wrapped model can load it"
            yield fragile(text, event.where, "module_prefix_saved")


def safe_loads(run):
    """checkpoints are loaded with weights_only=True"""
    for event in run.all(events.Load):
        if not event.weights_only:
            yield fragile("an untrusted file could run code", event.where, "weights_only_false")


def printed_loss_is_of_all(run):
    """printed values are summed over all ranks"""
    steps = list(run.by_rank(events.Step).values())
    if run.is_sharded and not any(step.inputs for step in run.all(events.Step)):
        yield not_applicable("ranks that share a model have the same loss")
    begun = taken = 0  # steps before this epoch, and until now
    summed = -2  # steps before something was reduced last: a loss may be printed a step later
    training = {one.number for one in lowest(run.passes_by_rank) if one.is_training}
    left = None  # samples that an evaluation has still to see
    alone, reduced = "", False
    places = {}  # line and position of a number -> what is said of it each time
    for event in lowest(run.events_by_rank):
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
                rows = list(zip(*(of[:taken] for of in steps)))
                for at, number in enumerate(re.finditer(FRACTION, event.text)):
                    reduced |= taken < summed + 2
                    alone = alone or ("" if taken < summed + 2 or left == 0 else event.where)
                    said = what_is_printed(number, [rows[-1:], rows[begun:], rows])
                    places.setdefault((event.where, at), []).append(said)
    for (where, _), said in places.items():
        if all(said) and len(said) > 1:  # once may be chance
            yield unsure(said[0], where, "rank_0_loss")
    if alone:
        yield unsure("no collective before it: is the loss that of rank 0?", alone, "rank_0_loss")
    if not reduced:
        yield unseen("no fraction is printed after a step and a collective")


def what_is_printed(match, windows):
    """Return what is wrong with a printed number, or an empty string if it may be right.

    A window is a list of steps, each a tuple of the ranks' events, of which it may be the mean.
    """
    value, digits = float(match[0]), len(match[1])
    if digits < 3 or not value:
        return ""
    off = 0.51 * 10**-digits + 1e-6 * abs(value)
    told = [text for rows in windows for near, text in meanings(rows) if abs(value - near) <= off]
    return f"{match[0]} is {told[0]}" if told and "" not in told else ""


def meanings(rows):
    """Yield what a printed number may be, and, unless that is right, what it is in words."""
    if not all(step.losses for row in rows for step in row) or not rows or len(rows[0]) < 2:
        return
    right, of_all, own = mean(rows), mean(rows, False), [row[:1] for row in rows]
    yield right, ""
    for value in (mean(own), mean(own, False)):
        yield value, f"the loss of rank 0, that of all ranks is {of_all:.4g}"
    yield len(rows[0]) * of_all, f"the sum over the ranks, their mean is {of_all:.4g}"
    yield of_all, f"a mean over batches of unequal size, over samples it is {right:.4g}"


def mean(rows, weighted=True):
    """Return the mean of the losses in these steps, weighted by samples if all are known."""
    every = [step for row in rows for step in row]
    weighted &= all(step.samples for step in every)  # else some are fetched ahead
    counts = [step.samples if weighted else 1 for step in every]
    return sum(n * step.losses[-1] for n, step in zip(counts, every)) / sum(counts)


def accuracy_is_of_samples(run):
    """a printed accuracy counts each sample once"""
    found = {r: [one for one in of if not one.is_training] for r, of in run.passes_by_rank.items()}
    evaluated = {one.number: one for one in lowest(found)}
    sizes = {rank: [one.sizes for one in of] for rank, of in found.items()}
    if len({size for one in evaluated.values() for size in one.sizes}) < 2:
        yield unseen("no batches of unequal size are evaluated")
    totals = {size for of in sizes.values() for one in of for size in (*one, sum(one))}
    trained = [[one.sizes for one in of if one.is_training] for of in run.passes_by_rank.values()]
    for passes in (sizes.values(), trained):
        totals |= {sum(map(sum, row)) for row in zip(*passes)}
    totals |= {one.length for one in evaluated.values() if one.length}
    last = None  # the evaluation that has just ended
    for event in lowest(run.events_by_rank):
        match event:
            case events.PassEnded():
                last = evaluated.get(event.number)
            case events.Batch() | events.Step():
                last = None
            case events.Print() if last and last.length:
                for shown, digits, percent in re.findall(ACCURACY, event.text):
                    whole = 100 if percent or float(shown) > 1 else 1
                    value, off = float(shown) / whole, 0.51 * 10 ** -len(digits) / whole
                    if not any(abs(value - round(value * n) / n) <= off for n in totals if n):
                        near = round(value * last.length) / last.length * whole
                        text = f"{shown} is no share of {last.length} samples, {near:.4g} is"
                        text += ": is it a mean over batches of unequal size, or over classes?"
                        yield unsure(text, event.where, "mean_of_means")
    yield passed("as far as one is printed right after an evaluation")
