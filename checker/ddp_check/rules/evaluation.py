"""Rules about which samples are evaluated, and what becomes of the result."""

import re
from dataclasses import replace
from itertools import chain, takewhile

from ddp_check import events
from ddp_check.ranks import counted, of_lowest_rank
from ddp_check.rules.base import passed, unseen, unsure, wrong
from ddp_check.rules.data import repeated

ACCURACY = r"(?i)(?<!train )\bacc[a-z]*\W*(\d+\.(\d+)) ?(%?)"
RESULT = r"(?i)acc|val|test|eval|score|correct|right|top|best|hit|f1"  # in a line
NEXT = events.Step | events.Batch | events.PassBegun  # what begins after an evaluation


def evaluations(run):
    """Return the evaluations: {size of a data set and line: [one pass of each rank]}.

    Without those on the training set, and, in a run that failed, those that a rank did not reach.
    """
    rows, every = {}, list(chain(*run.passes_by_rank.values()))
    trained = {(entry.data, entry.part) for entry in every if entry.is_training}
    whole = {(entry.data, entry.part) for entry in every if entry.is_whole}
    for rank, passes in run.passes_by_rank.items():
        for entry in passes:
            dataset = entry.data, entry.part
            # An evaluation may end early:
            left = dataset not in whole and entry.events_of(events.Looked)
            if (entry.is_whole or left) and entry.length and dataset not in trained:
                key = entry.length, entry.where
                rows.setdefault(key, {}).setdefault(rank, []).append(entry)
    least = 1 if run.returncode == 0 else len(run.events_by_rank)
    return {
        key: list(zip(*by_rank.values())) for key, by_rank in rows.items() if len(by_rank) >= least
    }


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    evaluated = evaluations(run)
    if not evaluated:
        return unseen("no DataLoader was used without training")
    ranks = len(run.events_by_rank)
    for (total, where), rows in evaluated.items():
        rests = [  # where all ranks evaluate the same few samples, which this may leave out
            row
            for row in chain(*evaluated.values())
            if row[0].data == rows[0][0].data and row[0].length < total and alike(row, "base")
        ]
        for row in rows:
            if verdict := missed(row, rests[:1], total, ranks):
                return replace(verdict, where=where, page="padded_evaluation")
    total, where = max(evaluated)
    return passed(counted(total, "sample"), where)


def alike(row, key="indices"):
    """Return whether all ranks evaluate the same known samples, perhaps in other orders."""
    samples = [entry.samples(key) for entry in row]
    return None not in samples and len({tuple(sorted(of_rank)) for of_rank in samples}) == 1


def missed(row, rests, total, ranks):
    """Return the verdict on samples that an evaluation does not see, or sees twice."""
    samples = [entry.samples() for entry in row]
    if None in samples or len({entry.part for entry in row}) > 1:
        return unseen("the samples have no index, or each rank evaluates a part of its own")
    if all(sorted(of_rank) == list(range(total)) for of_rank in samples):
        return None  # each of these ranks evaluates the whole set
    if not alike(row) and (twice := repeated(samples)):
        return counted_twice(row, twice, total)
    distinct = {index for entry in row for index in entry.samples("base")}
    whole = distinct.union(*(rest[0].samples("base") for rest in rests))
    if len(distinct) < total and len(whole) != total:
        text = f"it sees {len(distinct)} of {total} samples"
        return wrong(text) if is_lost(row, total, ranks) else unsure(f"{text}: is that intended?")
    if row[0].distributed and not rests:
        return unseen(f"{total} is divisible by {len(row)}; otherwise DistributedSampler would pad")


def is_lost(row, total, ranks):
    """Return whether nothing else counts the samples that an evaluation does not see."""
    dropped = row[0].drop_last or (row[0].distributed and len(row) < ranks)
    totals = [event.values for entry in row for event in entry.events_of(events.Totalled)]
    counted_elsewhere = any(total in values for values in totals)
    return dropped and not counted_elsewhere and all(entry.is_whole for entry in row)


def counted_twice(row, twice, total):
    """Return what is wrong with a padded evaluation, unless the padding is cut off."""
    loaded = sum(len(entry.samples()) for entry in row)
    text = f"{loaded} samples, {loaded - twice} of them distinct, of {total}"
    cuts = [cut for entry in row for cut in entry.events_of(events.Cut)]
    orders = {cut.order for cut in cuts if cut.dropped == twice}
    lengths = [event for entry in row for event in entry.events_of(events.Counted)]
    calls = [
        [call for call in entry.events_of(events.Collective) if not call.in_model] for entry in row
    ]
    gathers = [sum("gather" in call.name for call in of_rank) for of_rank in calls]
    if row[0].distributed and "blocks" in orders:
        give = wrong if max(gathers) == 1 else unsure
        lost = "what is gathered is in blocks, not in the data set's order, when its end is cut"
        return give(f"{lost} off: some are lost")
    if row[0].distributed and "another" in orders:
        return unsure("what is gathered is sorted when its end is cut off: is that the padding?")
    if orders or any(event.length == loaded - twice for event in lengths):
        return None
    reductions = [
        [call.sums for call in of_rank if call.sums or "gather" in call.name] for of_rank in calls
    ]
    added_first = all(of_rank[:1] == [True] for of_rank in reductions)
    if not any(gathers) or added_first:  # added up before it is gathered
        totals = {
            value
            for entry in row
            for event in entry.events_of(events.Totalled)
            for value in event.values
        }
        if loaded - twice in totals and loaded not in totals:
            return unsure(f"it loads {text}: are the extra ones left out?")
        return wrong(f"it counts {text}")
    if any(event.reduced and event.length == loaded for event in lengths):
        return wrong(f"it counts {text}: nothing is cut off after the gather")
    return unsure(f"it loads {text}: are the extra ones dropped after the gather?")


def result_is_of_all(run):
    """what follows from an evaluation depends on the parts of all ranks"""
    parts = [
        row
        for rows in evaluations(run).values()
        for row in rows
        if len(row) == len(run.events_by_rank) > 1 and disjoint(row)
    ]
    if not parts:
        return unseen("no evaluation is divided among the ranks")
    for row in parts:
        if verdict := own_part_printed(run, row):
            return verdict
    alone = [row for row in parts if not result_is_shared(run, row)]
    saves = [save for row in alone for save in following(run, row, events.Save)[:1]]
    if 0 < len(saves) < len(alone):  # it chooses when to save
        text = f"{part_of(alone[0])} before it saves: does it choose by its own part?"
        return unsure(text, saves[0].where, "rank_0_loss")
    if alone:
        return unseen("the parts are not brought together, and nothing is printed of them")
    return passed(counted(len(parts), "evaluation"), parts[0][0].where)


def disjoint(row):
    """Return whether each rank evaluates samples that no other does, but for padding."""
    samples = [entry.samples("base") for entry in row]
    if None in samples or not all(samples):
        return False
    return repeated(map(set, samples)) < len(row)


def following(run, row, *kinds):
    """Return what rank 0 does between its evaluation and its next batch or step."""
    found = of_lowest_rank(run.events_by_rank)
    last = max(at for at, event in enumerate(found) if event is row[0].batches[-1])
    until_next = takewhile(lambda event: not isinstance(event, NEXT), found[last + 1 :])
    return [event for event in until_next if isinstance(event, kinds)]


def result_is_shared(run, row):
    """Return whether a collective follows that can bring the results together."""
    calls = following(run, row, events.Collective)
    names = [call.name for call in calls if not call.in_model]
    received = following(run, row, events.Received)
    return bool(received) or any(re.search("reduce|gather|all_to_all", name) for name in names)


def part_of(row):
    """Return in words how much of the data rank 0 has evaluated."""
    own = len(row[0].samples())
    total = len(set(chain(*(entry.samples("base") for entry in row))))
    return f"rank 0 has evaluated {own} of {total} samples, and no collective brings it the rest"


def own_part_printed(run, row):
    """Return the verdict if rank 0 prints the result of its own part, without the others'."""
    if result_is_shared(run, row):
        return None
    _, *other_ranks = run.by_rank(events.Print).values()
    others = {event.where for printed in other_ranks for event in printed}
    for event in following(run, row, events.Print):
        alone = event.where not in others  # else each rank may print its own part
        if alone and re.search(RESULT, event.text) and has_share(event.text, len(row[0].samples())):
            text = f'{part_of(row)} when it prints "{event.text.strip()[:60]}"'
            return wrong(text, event.where, "rank_0_loss")


def has_share(text, count):
    """Return whether a line has a number that is a share of so many samples."""
    if re.search(rf"\d+ ?/ ?{count}\b", text):
        return True
    for shown, digits, percent in re.findall(r"(\d*\.(\d\d+)) ?(%?)", text):
        value, whole = float(shown), 100 if percent or float(shown) > 1 else 1
        share, off = value / whole, 0.51 * 10 ** -len(digits) / whole
        if share <= 1 and abs(share - round(share * count) / count) <= off:
            return True
    return False


def accuracy_is_of_samples(run):
    """a printed accuracy counts each sample once"""
    passes = {
        rank: [entry for entry in of_rank if not entry.is_training]
        for rank, of_rank in run.passes_by_rank.items()
    }
    evaluated = {entry.number: entry for entry in of_lowest_rank(passes)}
    if len({size for entry in evaluated.values() for size in entry.sizes}) < 2:
        return unseen("no batches of unequal size are evaluated")
    totals, trained = possible_totals(passes), totals_of_epochs(run)
    entry, compared = None, 0  # the evaluation that has just ended, and how many were compared
    for event in of_lowest_rank(run.events_by_rank):
        match event:
            case events.PassEnded():
                entry = evaluated.get(event.number)
            case events.Batch() | events.Step():
                entry = None
            case events.Print() if entry and entry.length:
                for shown, digits, percent in re.findall(ACCURACY, event.text):
                    compared += 1
                    if verdict := no_share(event, entry, totals, trained, shown, digits, percent):
                        return verdict
    if not compared:
        return unseen("no accuracy is printed right after an evaluation")
    return passed(counted(compared, "number"))


def possible_totals(passes_by_rank):
    """Return the numbers of samples that an accuracy may be a share of."""
    sizes = {rank: [entry.sizes for entry in passes] for rank, passes in passes_by_rank.items()}
    totals = {
        size for of_rank in sizes.values() for batch in of_rank for size in (*batch, sum(batch))
    }
    totals |= {sum(map(sum, row)) for row in zip(*sizes.values())}
    totals |= {entry.length for passes in passes_by_rank.values() for entry in passes}
    return {total for total in totals if total}


def totals_of_epochs(run):
    """Return how many samples all ranks have trained on in an epoch."""
    return {sum(sum(entry.sizes) for entry in epoch.values()) for epoch in run.epochs} - {0}


def no_share(event, entry, totals, trained, shown, digits, percent):
    """Return the verdict if a printed accuracy is no share of any number of samples."""
    whole = 100 if percent or float(shown) > 1 else 1
    value, off = float(shown) / whole, 0.51 * 10 ** -len(digits) / whole
    totals = totals | {total for total in trained if off * total < 0.25}  # of more, anything is one
    if any(abs(value - round(value * total) / total) <= off for total in totals):
        return None
    near = round(value * entry.length) / entry.length * whole
    text = f"{shown} is no share of {entry.length} samples, {near:.4g} is"
    text += ": is it a mean over batches of unequal size, or over classes?"
    return unsure(text, event.where, "mean_of_means")
