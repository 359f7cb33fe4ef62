"""Rules about which samples are evaluated, and what becomes of the result.

An evaluation is a tuple here, `parts`: the pass over the data of each rank that takes part.
"""

import re
from dataclasses import replace
from itertools import chain

from ddp_check import events
from ddp_check.ranks import counted, grouped, of_lowest_rank
from ddp_check.rules.base import passed, unseen, unsure, worst, wrong
from ddp_check.rules.data import are_the_same, padding_allowed, repeats
from ddp_check.rules.output import LOSS, sum_is_printed
from ddp_check.rules.printed import SAYS_RANK, SHARE, numbers_in
from ddp_check.run import SENDS

# Before a number:
ACCURACY = r"(?i)(?<!train[ _])(?<!training[ _])(?<![a-z])acc[a-z]*(?:@\d+)?\W*$"
RESULT = r"(?i)(?<![a-z])(acc|val|test|eval|score|correct|right|top|best|hit|f1)"  # in a line
ENDS_AN_EVALUATION = events.Step | events.PassBegun  # not a batch that the loop leaves unused


def evaluations(run):
    """Return the evaluations.

    Passes over a training set do not count, nor, in a run that failed, what a rank did not reach.
    """
    passes = list(chain(*run.passes_by_rank.values()))
    trained = {data_pass.dataset for data_pass in passes if data_pass.is_training}
    read_whole = {data_pass.dataset for data_pass in passes if data_pass.is_whole}

    def evaluates(data_pass):
        if data_pass.dataset in trained or not (data_pass.batches and data_pass.sample_count):
            return False
        # One that is left early counts if no pass reads this data as a whole: then it is meant.
        is_meant = data_pass.dataset not in read_whole and run.returncode == 0
        return data_pass.is_whole or (is_meant and data_pass.events_of(events.BatchEvaluated))

    evaluating = {
        rank: [data_pass for data_pass in of_rank if evaluates(data_pass)]
        for rank, of_rank in run.passes_by_rank.items()
    }
    ranks_needed = 1 if run.returncode == 0 else run.world_size
    by_line = grouped(evaluating, lambda each: (each.sample_count, each.where))
    of_all = [key for key, of_ranks in by_line.items() if len(of_ranks) == run.world_size]

    def loop_of(data_pass):
        # With a progress bar on one rank alone, its loop begins in another line.
        size_and_line = data_pass.sample_count, data_pass.where
        return size_and_line if size_and_line in of_all else data_pass.dataset

    by_loop = grouped(evaluating, loop_of).values()
    enough = [of_ranks for of_ranks in by_loop if len(of_ranks) >= ranks_needed]
    return [parts for of_ranks in enough for parts in zip(*of_ranks.values())]


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    evaluated = evaluations(run)
    if not evaluated:
        return unseen("no DataLoader was used without training")
    verdicts = []
    for parts in evaluated:
        verdict = in_another_order(parts) or not_once(parts, remainder(parts, evaluated), run)
        if verdict:
            verdicts.append(replace(verdict, where=parts[0].where, page="padded_evaluation"))
    largest = max((part for part, *_ in evaluated), key=lambda part: part.sample_count)
    return worst(verdicts) or passed(counted(largest.sample_count, "sample"), largest.where)


def remainder(parts, evaluations):
    """Return the indices of what all ranks evaluate in another pass, beside their parts.

    Of 65 samples, a script may divide 64 among its ranks, and let all of them evaluate the last.
    """
    for others in evaluations:
        is_smaller = others[0].sample_count < parts[0].sample_count
        same_data = others[0].dataset_checksum == parts[0].dataset_checksum
        samples = [part.values("base_indices") for part in others]
        if is_smaller and same_data and None not in samples and are_the_same(samples):
            return set(samples[0])
    return set()


def in_another_order(parts):
    """Return the verdict if the ranks got the samples in turns, and their parts stay in blocks.

    A block is one rank's part. Of the labels, far more agree if the ranks take turns.
    """
    samples = [part.values("indices") for part in parts]
    in_turns = all(of_rank and of_rank[0] == rank for rank, of_rank in enumerate(samples))
    if len(parts) < 2 or not in_turns:
        return None
    for event in chain(*(part.events_of(events.Counted) for part in parts)):
        # More than chance: two standard deviations of such a number are at most this root.
        if event.equal is not None and event.equal_in_turns > event.equal + 2 * event.length**0.5:
            text = "what is gathered is in another order than the labels, one rank's part behind "
            text += f"another's: {event.equal} of {event.length} agree, and "
            return wrong(f"{text}{event.equal_in_turns} if the ranks take turns")
    return None


def not_once(parts, evaluated_elsewhere, run):
    """Return the verdict on an evaluation that leaves out samples, or sees some twice.

    If nothing is seen twice because the size is divisible by the number of ranks, it is `unseen`:
    with another size, DistributedSampler would pad.

    evaluated_elsewhere: indices that all ranks evaluate in another pass, see `remainder`
    """
    size, samples = parts[0].sample_count, [part.values("indices") for part in parts]
    known = [part.values("base_indices") for part in parts]
    if None in known or len({part.subset_checksum for part in parts}) > 1:
        return unseen("the samples have no index, or each rank evaluates a part of its own")
    if all(sorted(of_rank) == list(range(size)) for of_rank in samples):
        return None  # each of these ranks evaluates the whole set
    twice = repeats(chain(*samples))
    is_whole = all(part.is_whole for part in parts)
    if twice and not are_the_same(samples):
        if not (is_whole or parts[0].distributed):
            return unseen("each rank evaluates some batches, in an order of its own")
        return padded(parts, twice)
    distinct = {index for part in parts for index in part.values("base_indices")}
    if len(distinct) < size and len(distinct | evaluated_elsewhere) != size:
        text = f"it sees {len(distinct)} of {size} samples"
        lacks_ranks = parts[0].distributed and len(parts) < run.world_size
        if lacks_ranks and is_whole and size not in totals_after(parts):
            return wrong(text)  # the ranks that are missing add nothing up
        return unsure(f"{text}: is that intended?")
    if parts[0].distributed and not evaluated_elsewhere:
        return unseen(f"{size} is divisible by {len(parts)}; else DistributedSampler would pad")


def totals_after(parts):
    """Return the whole numbers that are added up over the ranks: perhaps of samples."""
    totals = chain(*(part.events_of(events.Totalled) for part in parts))
    return {value for event in totals for value in event.values}


def padded(parts, twice):
    """Return the verdict on an evaluation that is padded: that loads so many samples again.

    What becomes of the extra samples is looked for in this order; if it is not seen, it is unsure:
    - cut off after a gather: right, but not if DistributedSampler's parts are in blocks, one rank's
      behind another's, and there are several extra samples, as each is the end of another block;
    - after a gather, only as many are compared or read as are distinct: right;
    - the ranks add up what they have counted, or gather so few numbers that there is none for each
      sample: wrong; but unsure if a total is that of the distinct;
    - all that is gathered is reduced to one number: wrong.
    """
    loaded = sum(len(part.values("indices")) for part in parts)
    distinct = loaded - twice
    text = f"{loaded} samples, {distinct} of them distinct, of {parts[0].sample_count}"
    calls_by_rank = [sums_and_gathers(part) for part in parts]
    gathers = max(sum("gather" in call.name for call in calls) for calls in calls_by_rank)
    cuts = [cut for part in parts for cut in part.events_of(events.Cut) if cut.dropped == twice]
    used = [event for part in parts for event in part.events_of(events.Counted)]
    if cuts:
        in_blocks = parts[0].distributed and any(cut.in_blocks for cut in cuts)
        compared = gathers == 1 and any(event.equal is not None for event in used)
        loses_nothing = twice == 1 and not compared  # the only extra one ends the last block
        if not in_blocks or loses_nothing:
            return None
        text = "what is gathered is in blocks, one rank's part behind another's, when its end is "
        text += "cut off: other samples are lost, or in another order than their labels"
        return wrong(text) if gathers == 1 else unsure(text)  # of several, each may hold one batch
    if any(event.length == distinct for event in used):
        return None
    if only_counts_are_shared(parts, calls_by_rank):
        totals = totals_after(parts)
        if distinct in totals and loaded not in totals:
            return unsure(f"it loads {text}: are the extra ones left out?")
        return wrong(f"it counts {text}")
    if any(event.reduced and event.length == loaded for event in used):
        return wrong(f"it counts {text}: nothing is cut off after the gather")
    return unsure(f"it loads {text}: are the extra ones dropped after the gather?")


def only_counts_are_shared(parts, calls_by_rank):
    """Return whether the ranks add up numbers, or gather too few for one of each sample.

    calls_by_rank: their sums and gathers
    """
    # What comes first brings the results together; what follows may be of anything.
    if all(calls and calls[0].sums for calls in calls_by_rank):
        return True
    gathers = [call for call in calls_by_rank[0] if "gather" in call.name]
    if not gathers or any("object" in call.name for call in gathers):  # an object may be long
        return False
    return sum(call.elements for call in gathers) < len(parts[0].values("indices"))


def sums_and_gathers(part):
    """Return the collectives by which a rank brings what it has evaluated to the others."""
    calls = part.events_of(events.Collective)
    return [call for call in calls if not call.in_model and (call.sums or "gather" in call.name)]


def result_is_of_all(run):
    """the result of an evaluation is that of all ranks"""
    divided = [
        parts
        for parts in evaluations(run)
        if len(parts) == run.world_size > 1 and is_divided(parts)
    ]
    if not divided:
        return own_data_printed(run) or unseen("no evaluation is divided among the ranks")
    for parts in divided:
        if verdict := own_part_printed(run, parts):
            return verdict
    # No collective that follows brings these together:
    kept_apart = [parts for parts in divided if not result_is_shared(run, parts[0].batches[-1])]
    if not kept_apart:
        return passed(counted(len(divided), "evaluation"), divided[0][0].where)
    saves = [first_save_after(run, parts) for parts in kept_apart]
    if any(saves) and None in saves:  # it saves after some evaluations only, as with `if better:`
        text = f"{own_part(kept_apart[0])} before it saves: does it choose by its own part?"
        return unsure(text, next(filter(None, saves)).where, "rank_0_loss")
    return unseen(
        "the parts are not brought together, and no number that is printed is known to be of one"
    )


def first_save_after(run, parts):
    """Return the first save of rank 0 that follows an evaluation, or None."""
    saves = run.following(parts[0].batches[-1], events.Save, ENDS_AN_EVALUATION)
    return next(iter(saves), None)


def is_divided(parts):
    """Return whether each rank evaluates samples that no other does, but for padding."""
    samples = [part.values("base_indices") for part in parts]
    if None in samples or not all(samples):
        return False
    if any(set(of_rank) == set(chain(*samples)) for of_rank in samples):
        return False
    return repeats(chain(*map(set, samples))) <= padding_allowed(parts)


def own_part(parts):
    """Return in words how much of the data rank 0 has evaluated."""
    own = len(parts[0].values("indices"))
    total = len(set(chain(*(part.values("base_indices") for part in parts))))
    return f"rank 0 has evaluated {own} of {total} samples, and no collective brings it the rest"


def result_is_shared(run, last, parts=()):
    """Return whether a collective that can bring results together follows what rank 0 did last.

    A lone sum of how many samples the ranks have in their parts brings no result.

    parts: of the evaluation, if that is asked, too
    """
    calls = run.following(last, events.Collective, ENDS_AN_EVALUATION)
    names = [call.name for call in calls if not call.in_model]
    shared = [name for name in names if re.search("reduce|gather|all_to_all", name)]
    totals = run.following(last, events.Totalled, ENDS_AN_EVALUATION)
    if len(shared) == len(totals) == 1 and parts:
        counts = [sum(part.sizes) for part in parts]
        adds_up_counts = totals[0].own == counts[0] and totals[0].total == sum(counts)
        return not adds_up_counts
    return bool(shared)


def own_part_printed(run, parts):
    """Return the verdict if rank 0 prints the result of its own part, without the others'.

    It surely is, if it is a share of its own samples, such as 0.9697 for 32 of 33, or of as many as
    the ranks have added up: then rank 0 divides its own number by that of all.
    """
    verdicts = []
    last, own = parts[0].batches[-1], sum(parts[0].sizes)
    added_up = [event.total for event in run.following(last, events.Totalled, ENDS_AN_EVALUATION)]
    totals = [total for total in (own, *added_up) if total]
    for line in results_of_rank_0(run, last, parts):
        if re.search(SAYS_RANK, line.text):
            continue  # it says whose result it is
        numbers = numbers_in(line.text)
        shares = [number for number in numbers if re.search(SHARE, number.words)]
        is_share = any(
            0 < number.value < number.whole and number.is_only_share_of(total)
            for number in shares
            for total in totals
        )
        text = f'{own_part(parts)} when it prints "{line.text.strip()[:60]}"'
        if is_share or re.search(rf"\d+ ?/ ?{own}\b", line.text):
            verdict = wrong
            files = run.following(last, events.Read, ENDS_AN_EVALUATION)
            if files or re.search(SENDS, run.source):
                text, verdict = f"{text}: or do files or send() bring it?", unsure
        elif result_is_shared(run, last):  # by a sum that may be that of the sizes of the parts
            continue
        elif shares or any(re.search(LOSS, number.words) for number in numbers):
            text, verdict = f"{text}: is it its own, or do files bring the rest?", unsure
        else:
            continue
        verdicts.append(verdict(text, line.where, "rank_0_loss"))
    return worst(verdicts)


def own_data_printed(run):
    """Return the verdict if the ranks evaluate other data, without a DataLoader, and one prints."""
    passes = of_lowest_rank(run.passes_by_rank)
    evaluating = {data_pass.pass_number for data_pass in passes if not data_pass.is_training}
    for row in run.rows(events.Evaluated):
        if row[0].pass_number in evaluating or len({event.inputs for event in row}) == 1:
            continue
        for line in results_of_rank_0(run, row[0]):
            if numbers_in(line.text) and not re.search(SAYS_RANK, line.text):
                text = "each rank evaluates other data, and no collective brings the results "
                text += f'together when rank 0 prints "{line.text.strip()[:60]}": is it its own?'
                return unsure(text, line.where, "rank_0_loss")


def results_of_rank_0(run, last, parts=()):
    """Return the lines with a result of its own that rank 0 alone prints after an evaluation."""
    if result_is_shared(run, last, parts):
        return []
    _, *of_other_ranks = run.by_rank(events.Print).values()
    elsewhere = {line.where for line in chain(*of_other_ranks)}  # each rank prints its own
    lines = run.following(last, events.Print, ENDS_AN_EVALUATION)
    return [line for line in lines if line.where not in elsewhere and re.search(RESULT, line.text)]


def accuracy_is_of_samples(run):
    """a printed accuracy is a share of the samples"""
    if verdict := sum_is_printed(run, SHARE):
        return verdict
    passes_by_rank = {
        rank: [data_pass for data_pass in passes if not data_pass.is_training]
        for rank, passes in run.passes_by_rank.items()
    }
    evaluated = {each.pass_number: each for each in of_lowest_rank(passes_by_rank)}
    if len({size for each in evaluated.values() for size in each.sizes}) < 2:
        return unseen("no batches of unequal size are evaluated")
    if any(batch.label_size != 1 for each in evaluated.values() for batch in each.batches):
        return unseen("the samples have several labels each, or none: of what it is a share?")
    accuracies = [
        (number, evaluated[ended.pass_number].sample_count, line.where)
        for ended in run.of_lowest_rank(events.PassEnded)
        if ended.pass_number in evaluated
        for line in run.following(ended, events.Print, events.Batch | events.Step)
        for number in numbers_in(line.text)
        if re.search(ACCURACY, number.words) and number.value not in (0, 1, 100)
    ]
    totals = possible_totals(passes_by_rank)
    for number, size, where in accuracies:
        if size and not any(map(number.is_share_of, totals)):
            share = round(number.value / number.whole * size) / size * number.whole
            text = f"{number.shown} is no share of {size} samples, {share:.4g} is"
            text += ": is it a mean over batches of unequal size, or over classes?"
            return unsure(text, where, "mean_of_means")
    if not accuracies:
        return unseen("no accuracy is printed right after an evaluation")
    return passed(counted(len(accuracies), "number"))


def possible_totals(passes_by_rank):
    """Return the numbers of samples that an accuracy may be a share of.

    It may be that of a batch, of a pass, of the passes of all ranks, or of the whole data set.
    """
    passes = list(chain(*passes_by_rank.values()))
    totals = {size for data_pass in passes for size in data_pass.sizes}
    totals |= {sum(data_pass.sizes) for data_pass in passes}
    totals |= {sum(sum(part.sizes) for part in parts) for parts in zip(*passes_by_rank.values())}
    totals |= {data_pass.sample_count for data_pass in passes}
    return totals - {0, None}
