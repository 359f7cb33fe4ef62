"""Rules about which samples are evaluated, and what becomes of the result."""

import re
from dataclasses import replace
from itertools import chain, dropwhile, takewhile
from typing import NamedTuple

from ddp_check import events
from ddp_check.ranks import counted, of_lowest_rank
from ddp_check.rules.base import passed, unseen, unsure, wrong
from ddp_check.rules.data import repeated
from ddp_check.rules.output import FRACTION, SAYS_RANK, sum_is_printed

ACCURACY = r"(?i)(?<!train )(?<!training )\bacc[a-z]*\W*(\d+\.(\d+)) ?(%?)"
ACCURATE = r"(?i)(\bacc|\bf1|\biou|\bauc|precision|recall)[^\n\d]*$"  # before a number
RESULT = r"(?i)(?<![a-z])(acc|val|test|eval|score|correct|right|top|best|hit|f1)"  # in a line
NEXT = events.Step | events.Batch | events.PassBegun  # what begins after an evaluation


def evaluations(run):
    """Return the evaluations: {(size of the data set, line): [one pass of each rank]}.

    Passes over a training set do not count, nor, in a run that failed, what a rank did not reach.
    """
    passes = list(chain(*run.passes_by_rank.values()))
    trained = {entry.dataset for entry in passes if entry.is_training}
    read_whole = {entry.dataset for entry in passes if entry.is_whole}
    passes_by_place = {}  # (size, line) -> rank -> its passes
    for rank, passes in run.passes_by_rank.items():
        for entry in passes:
            left_early = entry.dataset not in read_whole and entry.events_of(events.BatchEvaluated)
            seen = entry.batches and (entry.is_whole or left_early)
            if seen and entry.sample_count and entry.dataset not in trained:
                place = entry.sample_count, entry.where
                passes_by_place.setdefault(place, {}).setdefault(rank, []).append(entry)
    least = 1 if run.returncode == 0 else run.world_size  # ranks that evaluate
    return {
        place: list(zip(*by_rank.values()))
        for place, by_rank in passes_by_place.items()
        if len(by_rank) >= least
    }


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    evaluated = evaluations(run)
    if not evaluated:
        return unseen("no DataLoader was used without training")
    ranks = run.world_size
    for (total, where), rows in evaluated.items():
        smaller = [row for row in chain(*evaluated.values()) if row[0].sample_count < total]
        beside = evaluated_by_all(rows[0][0].dataset_checksum, smaller)
        for row in rows:
            if verdict := missed(row, beside, total, ranks):
                return replace(verdict, where=where, page="padded_evaluation")
    total, where = max(evaluated)
    return passed(counted(total, "sample"), where)


def evaluated_by_all(data, rows):
    """Return the indices of samples of a data set that every rank evaluates: a remainder."""
    for row in rows:
        if row[0].dataset_checksum == data and alike(row, "base_indices"):
            return set(row[0].values("base_indices"))
    return set()


def alike(row, field_name="indices"):
    """Return whether all ranks evaluate the same known samples, perhaps in other orders."""
    samples = [entry.values(field_name) for entry in row]
    return None not in samples and len({tuple(sorted(of_rank)) for of_rank in samples}) == 1


def missed(row, beside, total, ranks):
    """Return the verdict on samples that an evaluation does not see, or sees twice.

    The samples with the indices `beside` are evaluated elsewhere.
    """
    samples = [entry.values("indices") for entry in row]
    if None in samples or len({entry.subset_checksum for entry in row}) > 1:
        return unseen("the samples have no index, or each rank evaluates a part of its own")
    if all(sorted(of_rank) == list(range(total)) for of_rank in samples):
        return None  # each of these ranks evaluates the whole set
    if not alike(row) and (twice := repeated(chain(*samples))):
        return counted_twice(row, twice, total)
    distinct = {index for entry in row for index in entry.values("base_indices")}
    if len(distinct) < total and len(distinct | beside) != total:
        text = f"it sees {len(distinct)} of {total} samples"
        return wrong(text) if is_lost(row, total, ranks) else unsure(f"{text}: is that intended?")
    if row[0].distributed and not beside:
        return unseen(f"{total} is divisible by {len(row)}; otherwise DistributedSampler would pad")


def is_lost(row, total, ranks):
    """Return whether nothing else counts the samples that an evaluation does not see."""
    dropped = row[0].drop_last or (row[0].distributed and len(row) < ranks)
    counted_elsewhere = total in totals_after(row)
    return dropped and not counted_elsewhere and all(entry.is_whole for entry in row)


def totals_after(row):
    """Return the whole numbers that are added up over the ranks after an evaluation."""
    return {value for event in events_after(row, events.Totalled) for value in event.values}


def events_after(row, kind):
    """Return the events of a kind that follow a batch of an evaluation, on all ranks."""
    return [event for entry in row for event in entry.events_of(kind)]


def counted_twice(row, twice, total):
    """Return what is wrong with an evaluation that is padded: that loads `twice` samples again.

    A script may cut the padding off after a gather, or leave it out of what the ranks add up.
    """
    loaded = sum(len(entry.values("indices")) for entry in row)
    text = f"{loaded} samples, {loaded - twice} of them distinct, of {total}"
    collectives = [sums_and_gathers(entry) for entry in row]
    gathers = max(sum("gather" in call.name for call in calls) for calls in collectives)
    cuts = [cut for cut in events_after(row, events.Cut) if cut.dropped == twice]
    if cuts:
        return cut_in_order(cuts, gathers) if row[0].distributed else None
    lengths = events_after(row, events.Counted)
    if any(event.length == loaded - twice for event in lengths):
        return None
    sums_first = all(calls and calls[0].sums for calls in collectives)
    if not gathers or sums_first:
        totals = totals_after(row)
        if loaded - twice in totals and loaded not in totals:
            return unsure(f"it loads {text}: are the extra ones left out?")
        return wrong(f"it counts {text}")
    if any(event.reduced and event.length == loaded for event in lengths):
        return wrong(f"it counts {text}: nothing is cut off after the gather")
    return unsure(f"it loads {text}: are the extra ones dropped after the gather?")


def sums_and_gathers(entry):
    """Return the collectives by which a rank brings what it has evaluated to the others."""
    calls = entry.events_of(events.Collective)
    return [call for call in calls if not call.in_model and (call.sums or "gather" in call.name)]


def cut_in_order(cuts, gathers):
    """Return the verdict on gathered results whose end is cut off."""
    if any(cut.in_blocks for cut in cuts):
        text = "what is gathered is in blocks, not in the data set's order, when its end is cut "
        text += "off: some are lost"
        return wrong(text) if gathers == 1 else unsure(text)  # of several, each may hold one batch
    return None


def result_is_of_all(run):
    """what follows from an evaluation depends on the parts of all ranks"""
    parts = [
        row
        for rows in evaluations(run).values()
        for row in rows
        if len(row) == run.world_size > 1 and disjoint(row)
    ]
    if not parts:
        return own_data_printed(run) or unseen("no evaluation is divided among the ranks")
    for row in parts:
        if verdict := own_part_printed(run, row):
            return verdict
    alone = [row for row in parts if not result_is_shared(run, last_of(row))]
    saves = [save for row in alone for save in following(run, last_of(row), events.Save)[:1]]
    if 0 < len(saves) < len(alone):  # it chooses when to save
        text = f"{part_of(alone[0])} before it saves: does it choose by its own part?"
        return unsure(text, saves[0].where, "rank_0_loss")
    if alone:
        return unseen("the parts are not brought together, and nothing is printed of them")
    return passed(counted(len(parts), "evaluation"), parts[0][0].where)


def disjoint(row):
    """Return whether each rank evaluates samples that no other does, but for padding."""
    samples = [entry.values("base_indices") for entry in row]
    if None in samples or not all(samples):
        return False
    return repeated(chain(*map(set, samples))) < len(row)


def last_of(row):
    """Return the last batch that rank 0 has evaluated."""
    return row[0].batches[-1]


def following(run, last, *kinds):
    """Return what rank 0 does between this event and its next batch or step."""
    after_last = dropwhile(lambda event: event is not last, of_lowest_rank(run.events_by_rank))
    until_next = takewhile(lambda event: not isinstance(event, NEXT), [*after_last][1:])
    return [event for event in until_next if isinstance(event, kinds)]


def result_is_shared(run, last):
    """Return whether a collective follows that can bring the results together."""
    calls = following(run, last, events.Collective)
    names = [call.name for call in calls if not call.in_model]
    return any(re.search("reduce|gather|all_to_all", name) for name in names)


def part_of(row):
    """Return in words how much of the data rank 0 has evaluated."""
    own = len(row[0].values("indices"))
    total = len(set(chain(*(entry.values("base_indices") for entry in row))))
    return f"rank 0 has evaluated {own} of {total} samples, and no collective brings it the rest"


def own_part_printed(run, row):
    """Return the verdict if rank 0 prints the result of its own part, without the others'."""
    count = len(row[0].values("indices"))
    for event in results_of_rank_0(run, last_of(row)):
        if has_share(event.text, count):
            text = f'{part_of(row)} when it prints "{event.text.strip()[:60]}"'
            return wrong(text, event.where, "rank_0_loss")


def own_data_printed(run):
    """Return the verdict if the ranks evaluate other data, without a DataLoader, and one prints."""
    passes = of_lowest_rank(run.passes_by_rank)
    evaluating = {entry.pass_number for entry in passes if not entry.is_training}
    for row in zip(*run.by_rank(events.Evaluated).values()):
        if row[0].pass_number in evaluating or len({event.inputs for event in row}) == 1:
            continue
        for event in results_of_rank_0(run, row[0]):
            if re.search(FRACTION, event.text) and not re.search(SAYS_RANK, event.text):
                text = "each rank evaluates other data, and no collective brings the results "
                text += f'together when rank 0 prints "{event.text.strip()[:60]}": is it its own?'
                return unsure(text, event.where, "rank_0_loss")


def results_of_rank_0(run, last):
    """Return the lines with a result of its own that rank 0 alone prints after an evaluation."""
    if result_is_shared(run, last):
        return []
    _, *other_ranks = run.by_rank(events.Print).values()
    others = {event.where for printed in other_ranks for event in printed}  # each its own part
    lines = following(run, last, events.Print)
    return [line for line in lines if line.where not in others and re.search(RESULT, line.text)]


class Share(NamedTuple):
    """A share that is printed, such as 0.9807 or 98.07 %."""

    value: float  # from 0 to 1
    error: float  # by which it may have been rounded
    whole: int  # 100 for a percentage, else 1

    def is_of(self, total):
        """Return whether a whole number of so many samples has this share."""
        return abs(self.value - round(self.value * total) / total) <= self.error


def printed_share(shown, digits, percent):
    """Return the share that a decimal stands for: a percentage if it is larger than 1."""
    whole = 100 if percent or float(shown) > 1 else 1
    return Share(float(shown) / whole, 0.51 * 10 ** -len(digits) / whole, whole)


def has_share(text, count):
    """Return whether a line has a number that is a share of so many samples."""
    if re.search(rf"\d+ ?/ ?{count}\b", text):
        return True
    shares = [printed_share(*match) for match in re.findall(r"(\d*\.(\d\d+)) ?(%?)", text)]
    return any(share.value <= 1 and share.is_of(count) for share in shares)


def accuracy_is_of_samples(run):
    """a printed accuracy counts each sample once"""
    if verdict := sum_is_printed(run, ACCURATE):
        return verdict
    passes = {
        rank: [entry for entry in of_rank if not entry.is_training]
        for rank, of_rank in run.passes_by_rank.items()
    }
    evaluated = {entry.pass_number: entry for entry in of_lowest_rank(passes)}
    if len({size for entry in evaluated.values() for size in entry.sizes}) < 2:
        return unseen("no batches of unequal size are evaluated")
    if any(batch.label_size != 1 for entry in evaluated.values() for batch in entry.batches):
        return unseen("the samples have several labels each, or none: of what it is a share?")
    totals, trained = possible_totals(passes), totals_of_epochs(run)
    entry, compared = None, 0  # the evaluation that has just ended, and how many were compared
    for event in of_lowest_rank(run.events_by_rank):
        match event:
            case events.PassEnded():
                entry = evaluated.get(event.pass_number)
            case events.Batch() | events.Step():
                entry = None
            case events.Print() if entry and entry.sample_count:
                for match in re.findall(ACCURACY, event.text):
                    if float(match[0]) in (0, 1, 100):  # a share of any number
                        continue
                    compared += 1
                    share = printed_share(*match)
                    # Of many more samples than it has digits, any number is a share.
                    few = {total for total in trained if share.error * total < 0.25}
                    if not any(map(share.is_of, totals | few)):
                        return no_share(match[0], share, entry.sample_count, event.where)
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
    totals |= {entry.sample_count for passes in passes_by_rank.values() for entry in passes}
    return {total for total in totals if total}


def totals_of_epochs(run):
    """Return how many samples all ranks have trained on in an epoch."""
    totals = {sum(sum(entry.sizes) for entry in epoch.values()) for epoch in run.epochs}
    return {total for total in totals if total}


def no_share(shown, share, count, where):
    """Return the verdict on a printed accuracy that is no share of any number of samples."""
    near = round(share.value * count) / count * share.whole
    text = f"{shown} is no share of {count} samples, {near:.4g} is"
    text += ": is it a mean over batches of unequal size, or over classes?"
    return unsure(text, where, "mean_of_means")
