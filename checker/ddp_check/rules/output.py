"""Rules about what is printed, written and loaded."""

import re
from pathlib import Path

from ddp_check import events
from ddp_check.passes import passes
from ddp_check.ranks import differ, lowest
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, wrong

FRACTION = r"-?\d+\.(\d+)(?!\.?\d)(?:e[+-]?\d+)?"
ACCURACY = r"(?i)(?<!train )\bacc[a-z]*\W*(\d+\.(\d+)) ?(%?)"
WAITS = events.Step | events.Collective | events.Received
WRITES = events.Opened | events.Save | events.Renamed


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
        every = [(str(rank), text) for rank, of in texts.items() for text in of]
        its_own = all(rank in re.findall(r"\d+", text) for rank, text in every)
        labelled |= bool(common)
        if common and not its_own:
            text = f'ranks {" and ".join(map(str, texts))} print "{common[0]}"'
            yield unsure(f"{text}: is that intended?", where, "prints_on_every_rank")
    if labelled:
        yield unseen("every rank prints, with its own number: is that intended?")
    yield passed(f"{len(run.all(events.Print))} lines")


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writers, times = {}, {}  # file and how far its rank is -> rank -> line; file -> rank -> steps
    for rank, found in run.ranks.items():
        waited = steps = 0
        for event in found:
            steps, waited = (
                steps + isinstance(event, events.Step),
                waited + isinstance(event, WAITS),
            )
            if isinstance(event, WRITES) and event.path and not getattr(event, "append", False):
                writers.setdefault((event.path, waited), {})[rank] = event.where
                times.setdefault(event.path, {}).setdefault(rank, {})[steps] = event.where
    for (path, _), lines in writers.items():
        if len(lines) > 1:
            text = f"ranks {', '.join(map(str, lines))} write {Path(path).name}"
            yield wrong(text, lines[max(lines)], "every_rank_saves")
    for path, of in times.items():
        if run.returncode == 0 and differ({rank: set(lines) for rank, lines in of.items()}):
            text = f"ranks {', '.join(map(str, of))} write {Path(path).name} after other steps"
            where = next(iter(of[max(of)].values()))
            yield unsure(f"{text}: is that intended?", where, "every_rank_saves")
    saved = {event.path: event.where for event in run.all(events.Save) if event.path}
    renamed = {event.source for event in run.all(events.Renamed)}
    for path, where in saved.items():
        if path not in renamed:
            name = Path(path).name
            text = f"{name} is written in place: a crash during the save leaves half a file"
            yield fragile(text, where, "written_in_place")
    if not times:
        yield unseen("no file of the script's folder is written, or only lines are appended to it")
    yield passed(f"{len(times)} files", next(iter(saved.values()), ""))


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

    known = [rows for rows in windows if rows and len(rows[0]) > 1]
    known = [rows for rows in known if all(step.losses for row in rows for step in row)]
    if any(near(mean(weighed(rows))) for rows in known):
        return None
    for rows in known:
        of_all, own = mean(weighed(rows), 0), weighed([row[:1] for row in rows])
        if near(mean(own)) or near(mean(own, 0)):
            return f"{match[0]} is the loss of rank 0, that of all ranks is {of_all:.4g}"
        if near(len(rows[0]) * of_all):
            return f"{match[0]} is the sum over the ranks, their mean is {of_all:.4g}"
        if near(of_all):
            text = f"{match[0]} is a mean over batches of unequal size"
            return f"{text}, over samples it is {mean(weighed(rows)):.4g}"
    return None


def weighed(rows):
    """Return the loss of each step with the number of its samples, if that is known of all."""
    every = [step for row in rows for step in row]
    known = all(step.samples for step in every)  # else some are fetched ahead
    return [(step.losses[-1], step.samples if known else 1) for step in every]


def mean(pairs, power=1):
    """Return the mean of losses, each with the number of its samples, which may count or not."""
    return sum(loss * n**power for loss, n in pairs) / sum(n**power for _, n in pairs)


def accuracy_is_of_samples(run):
    """a printed accuracy counts each sample once"""
    found = {r: [one for one in of if not one.is_training] for r, of in passes(run).items()}
    evaluated = {one.number: one for one in lowest(found)}
    sizes = {rank: [one.sizes for one in of] for rank, of in found.items()}
    if len({size for one in evaluated.values() for size in one.sizes}) < 2:
        yield unseen("no batches of unequal size are evaluated")
    totals = {size for of in sizes.values() for one in of for size in (*one, sum(one))}
    totals |= {sum(map(sum, row)) for row in zip(*sizes.values())}
    totals |= {one.length for one in evaluated.values() if one.length}
    last = None  # the evaluation that has just ended
    for event in lowest(run.ranks):
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
