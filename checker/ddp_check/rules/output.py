"""Rules about what is printed, written and loaded."""

import re
from pathlib import Path

from ddp_check import events
from ddp_check.passes import passes
from ddp_check.ranks import lowest
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, wrong

FRACTION = r"-?\d+\.(\d+)(?!\.?\d)(?:e[+-]?\d+)?"


def one_rank_prints(run):
    """one rank prints the progress"""
    places = {}  # line of the script -> rank -> what it prints
    for rank, found in run.of(events.Print).items():
        for event in found:
            places.setdefault(event.where, {}).setdefault(rank, []).append(event.text)
    labelled = False
    for where, texts in places.items():
        patterns = [{re.sub(r"[\d.,]+", "#", text) for text in of} for of in texts.values()]
        common = sorted(set.intersection(*patterns)) if len(texts) > 1 else []
        if common and not names_its_rank(texts):
            text = f'ranks {" and ".join(map(str, texts))} print "{common[0]}"'
            yield unsure(f"{text}: is that intended?", where, "prints_on_every_rank")
        labelled |= bool(common)
    if labelled:
        yield unseen("every rank prints, with its own number: is that intended?")
    yield passed(f"{len(run.all(events.Print))} lines")


def names_its_rank(texts):
    """Return whether one number in each line is always the rank that prints it."""
    rows = [
        [number == str(rank) for number in re.findall(r"\d+", text)]
        for rank, of in texts.items()
        for text in of
    ]
    return any(all(column) for column in zip(*rows))


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writers = {}  # file and how far the ranks are -> rank -> line of the script
    for rank, found in run.ranks.items():
        at = 0  # how often the rank has waited for others
        for event in found:
            at += isinstance(event, events.Step | events.Collective | events.Received)
            writes = isinstance(event, events.Opened | events.Save | events.Renamed)
            if writes and event.path and not getattr(event, "append", False):
                writers.setdefault((event.path, at), {})[rank] = event.where
    for (path, _), lines in writers.items():
        if len(lines) > 1:
            text = f"ranks {', '.join(map(str, lines))} write {Path(path).name}"
            yield wrong(text, lines[max(lines)], "every_rank_saves")
    saved = {event.path: event.where for event in run.all(events.Save) if event.path}
    renamed = {event.source for event in run.all(events.Renamed)}
    for path, where in saved.items():
        if path not in renamed:
            name = Path(path).name
            text = f"{name} is written in place: a crash during the save leaves half a file"
            yield fragile(text, where, "written_in_place")
    files = {path for path, _ in writers}
    if not files:
        yield unseen("no file of the script's folder is written, or only lines are appended to it")
    yield passed(f"{len(files)} files", next(iter(saved.values()), ""))


def plain_names(run):
    """saved names do not begin with module."""
    saves = run.all(events.Save)
    own = {name for wrap in run.all(events.Wrap) for name, _ in wrap.shapes}
    for event in saves:
        if prefixed := [key for key in event.keys if key not in own]:
            text = f"a key is {prefixed[0]}: only a wrapped model can load it"
            yield fragile(text, event.where, "module_prefix_saved")
    yield passed(f"{len(saves)} saves", saves[0].where)


def safe_loads(run):
    """checkpoints are loaded with weights_only=True"""
    loads = run.all(events.Load)
    for event in loads:
        if not event.weights_only:
            text = "a file from an untrusted source could run code"
            yield fragile(text, event.where, "weights_only_false")
    yield passed(f"{len(loads)} loads", loads[0].where)


def printed_loss_is_of_all(run):
    """printed values are summed over all ranks"""
    steps = list(run.of(events.Step).values())
    if run.is_sharded and not any(step.inputs for of in steps for step in of):
        yield not_applicable("ranks that share a model have the same loss")
    begun, taken, alone = 0, 0, ""
    training = {one.number for one in lowest(passes(run)) if one.is_training}
    left = None  # samples that an evaluation has still to see
    before = since = reduced = False  # whether something was: before the last step, since, ever
    places = {}  # line and position of a number -> what is said of it each time
    for event in lowest(run.ranks):
        match event:
            case events.Step():
                taken, left = taken + 1, None
                before, since = since, False  # a loss may be reduced, and printed after the step
            case events.Collective(inside=False):
                since |= event.adds or "gather" in event.name
            case events.PassBegun():
                begun, left = taken if event.number in training else begun, event.length
            case events.Batch() if left:
                left -= len(event.indices or event.samples or ())
            case events.Print() if taken:
                rows = list(zip(*(of[:taken] for of in steps)))
                for at, number in enumerate(re.finditer(FRACTION, event.text)):
                    reduced |= before or since
                    alone = alone or ("" if before or since or left == 0 else event.where)
                    said = what_is_printed(number, [rows[-1:], rows[begun:], rows])
                    places.setdefault((event.where, at), []).append(said)
    for (where, _), said in places.items():
        if all(said) and len(said) > 1:  # once may be chance
            yield unsure(said[0], where, "rank_0_loss")
    if alone:
        text = "no collective before it: is the loss only that of rank 0?"
        yield unsure(text, alone, "rank_0_loss")
    if not reduced:
        yield unseen("no fraction is printed after a step and a collective")
    yield passed("after a collective")


def what_is_printed(match, windows):
    """Return what is wrong with a printed number, or None if it may be right.

    A window is a list of steps, each a tuple of the ranks' events, of which it may be the mean.
    """
    value, digits = float(match[0]), len(match[1])
    if digits < 3 or not value:
        return None

    def near(other):
        return abs(value - other) <= 0.51 * 10**-digits + 1e-6 * abs(value)

    known = [rows for rows in windows if all(step.losses for row in rows for step in row)]
    found = [means(rows) for rows in known if rows and len(rows[0]) > 1]
    if any(near(one["weighted"]) for one in found):
        return None
    for one in found:
        if near(one["own"]) or near(one["own weighted"]):
            return f"{match[0]} is the loss of rank 0, that of all ranks is {one['all']:.4g}"
        if near(one["sum"]):
            return f"{match[0]} is the sum over the ranks, their mean is {one['all']:.4g}"
        if near(one["all"]):
            text = f"{match[0]} is a mean over batches of unequal size"
            return f"{text}, over samples it is {one['weighted']:.4g}"
    return None


def means(rows):
    counted = all(step.samples for row in rows for step in row)  # else some are fetched ahead
    every = [[(step.losses[-1], step.samples if counted else 1) for step in row] for row in rows]
    own, every = [row[0] for row in every], [pair for row in every for pair in row]
    found = {"own": mean(own, 0), "own weighted": mean(own), "all": mean(every, 0)}
    return {**found, "weighted": mean(every), "sum": len(rows[0]) * found["all"]}


def mean(pairs, power=1):
    """Return the mean of losses, each with the number of its samples, which may count or not."""
    return sum(loss * n**power for loss, n in pairs) / sum(n**power for _, n in pairs)


def to_be_checked_by_hand(_):
    """what you must check yourself"""
    text = "division of losses, waiting for files, scaling of the learning rate"
    yield unseen(f"{text}, several nodes: see pitfalls/README.md")
