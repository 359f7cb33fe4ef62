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
    """Return the evaluations; in a run that failed, those that all ranks have reached.

    The parts of one begin in the same line, or at least read the same data: as where rank 0 begins
    its part inside the script's own bar, `for batch in bar(part) if rank == 0 else part`.
    """
    passes_by_rank = evaluating_passes(run)
    by_line = grouped(passes_by_rank, lambda each: (each.sample_count, each.where))
    lines_of_all = [line for line, of_ranks in by_line.items() if len(of_ranks) == run.world_size]

    def loop_of(data_pass):
        """Return its line if all ranks have passes there, else what it reads."""
        line = data_pass.sample_count, data_pass.where
        return line if line in lines_of_all else data_pass.dataset

    by_loop = grouped(passes_by_rank, loop_of).values()
    ranks_needed = 1 if run.returncode == 0 else run.world_size
    enough = [of_ranks for of_ranks in by_loop if len(of_ranks) >= ranks_needed]
    return [parts for of_ranks in enough for parts in zip(*of_ranks.values())]


def evaluating_passes(run):
    """Return the passes of each rank over data that is not trained on: {rank: [pass]}.

    One that is left early counts only if that is on purpose: no pass reads this data as a whole.
    """
    passes = list(chain(*run.passes_by_rank.values()))
    trained = {data_pass.dataset for data_pass in passes if data_pass.is_training}
    read_whole = {data_pass.dataset for data_pass in passes if data_pass.is_whole}

    def evaluates(data_pass):
        if data_pass.dataset in trained or not (data_pass.batches and data_pass.sample_count):
            return False
        on_purpose = data_pass.dataset not in read_whole and run.returncode == 0
        return data_pass.is_whole or (on_purpose and data_pass.events_of(events.BatchEvaluated))

    return {
        rank: [data_pass for data_pass in of_rank if evaluates(data_pass)]
        for rank, of_rank in run.passes_by_rank.items()
    }


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    if verdict := in_another_order(run):
        return verdict
    evaluated = evaluations(run)
    if not evaluated:
        return unseen("no DataLoader was used without training")
    verdicts = []
    for parts in evaluated:
        once = not_once(parts, remainder(parts, evaluated), run)
        if verdict := worst([once, read_in_blocks(parts)]):
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


def in_another_order(run):
    """Return the verdict if the ranks take turns in the labels, and in the predictions they do not.

    Two ranks that take turns get 0 2 4 and 1 3 5. What is gathered has a block of each, as in
    0 2 4 1 3 5, and far more of it would agree with the labels in turns, as in 0 1 2 3 4 5.
    """
    for event in run.all(events.Counted):
        # More than chance: the difference of two such numbers has a standard deviation of at most
        # 0.7 times this root.
        if event.equal is not None and event.equal_in_turns > event.equal + 2.5 * event.length**0.5:
            text = "what is gathered is in another order than the labels, one rank's part behind "
            text += f"another's: {event.equal} of {event.length} agree, and "
            text += f"{event.equal_in_turns} if the ranks take turns"
            return wrong(text, event.where, "padded_evaluation")


def read_in_blocks(parts):
    """Return the verdict if predictions alone are gathered, and are read in blocks."""
    gathers = [call for call in sums_and_gathers(parts[0]) if "gather" in call.name]
    read = [event for event in parts[0].events_of(events.Counted) if event.in_blocks]
    if parts[0].distributed and len(gathers) == 1 and read:
        text = "what is gathered has one rank's part behind another's, and the samples are dealt "
        return unsure(f"{text}in turns: is it put in the order of the data set?")


def not_once(parts, evaluated_elsewhere, run):
    """Return the verdict on an evaluation that leaves out samples, or sees some twice.

    - Some come twice: see `padded`; unseen if each rank has read a few in an order of its own.
    - Some are left out: wrong if it is the parts of other ranks, which add nothing up; else unsure.
    - Neither, but the size is divisible by the number of ranks: unseen, as DistributedSampler would
      pad another size.

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
            return wrong(text)
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
    1. They are cut off after a gather: right, but not if DistributedSampler's parts are in blocks,
       one rank's behind another's, and there are several extra samples:
           0 2 4 | 1 3 0          the end is extra
           0 3 6 | 1 4 0 | 2 5 1  not the end is extra, but 0 and 1
    2. After a gather, only as many are compared or read as are distinct: right.
    3. The ranks add up what they have counted, or gather so few numbers that there is none for each
       sample: wrong; but unsure if a total is that of the distinct.
    4. All that is gathered is reduced to one number: wrong.
    """
    loaded = sum(len(part.values("indices")) for part in parts)
    distinct = loaded - twice
    text = f"{loaded} samples, {distinct} of them distinct, of {parts[0].sample_count}"
    calls_by_rank = [sums_and_gathers(part) for part in parts]
    cuts = [cut for part in parts for cut in part.events_of(events.Cut) if cut.dropped == twice]
    used = [event for part in parts for event in part.events_of(events.Counted)]
    if cuts:  # 1
        gathers = max(sum("gather" in call.name for call in calls) for calls in calls_by_rank)
        in_blocks = parts[0].distributed and any(cut.in_blocks for cut in cuts)
        # With a single gather, labels are not gathered: they are in another order than the blocks.
        with_labels = gathers == 1 and any(event.equal is not None for event in used)
        # A single extra sample is the last of the last rank: the end of the blocks, too.
        if not in_blocks or (twice == 1 and not with_labels):
            return None
        text = "what is gathered is in blocks, one rank's part behind another's, when its end is "
        text += "cut off: other samples are lost, or in another order than their labels"
        return wrong(text) if gathers == 1 else unsure(text)  # of several, each may hold one batch
    if any(event.length == distinct for event in used):  # 2
        return None
    if only_counts_are_shared(parts, calls_by_rank):  # 3
        totals = totals_after(parts)
        if distinct in totals and loaded not in totals:
            return unsure(f"it loads {text}: are the extra ones left out?")
        return wrong(f"it counts {text}")
    if any(event.reduced and event.length == loaded for event in used):  # 4
        return wrong(f"it counts {text}: nothing is cut off after the gather")
    return unsure(f"it loads {text}: are the extra ones dropped after the gather?")


def only_counts_are_shared(parts, calls_by_rank):
    """Return whether the ranks add up numbers, or gather too few for one of each sample.

    calls_by_rank: their sums and gathers
    """
    # Only the first call counts as one for the results: later ones may be for anything else.
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
    divided = [parts for parts in evaluations(run) if is_divided(run, parts)]
    if not divided:
        return own_data_printed(run) or unseen("no evaluation is divided among the ranks")
    for parts in divided:
        if verdict := own_part_printed(run, parts):
            return verdict
    kept_apart = [parts for parts in divided if not calls_that_share(run, parts[0].batches[-1])]
    if not kept_apart:
        return passed(counted(len(divided), "evaluation"), divided[0][0].where)
    lasts = [parts[0].batches[-1] for parts in kept_apart]
    saves = [run.following(last, events.Save, ENDS_AN_EVALUATION) for last in lasts]
    if any(saves) and not all(saves):  # it saves after some evaluations only: `if better:`
        text = f"{own_part(kept_apart[0])} before it saves: does it choose by its own part?"
        return unsure(text, next(filter(None, saves))[0].where, "rank_0_loss")
    return unseen(
        "the parts are not brought together, and no number that is printed is known to be of one"
    )


def is_divided(run, parts):
    """Return whether each rank evaluates samples that no other does, but for padding."""
    samples = [part.values("base_indices") for part in parts]
    if not len(parts) == run.world_size > 1 or None in samples or not all(samples):
        return False
    if any(set(of_rank) == set(chain(*samples)) for of_rank in samples):
        return False
    return repeats(chain(*map(set, samples))) <= padding_allowed(parts)


def own_part(parts):
    """Return in words how much of the data rank 0 has evaluated."""
    own = len(parts[0].values("indices"))
    total = len(set(chain(*(part.values("base_indices") for part in parts))))
    return f"rank 0 has evaluated {own} of {total} samples, and no collective brings it the rest"


def calls_that_share(run, last):
    """Return the collectives after what rank 0 did last that can bring results together."""
    calls = run.following(last, events.Collective, ENDS_AN_EVALUATION)
    names = "reduce|gather|all_to_all"
    return [call for call in calls if not call.in_model and re.search(names, call.name)]


def only_sizes_are_shared(run, parts):
    """Return whether the ranks only add up how many samples are in their parts: no result."""
    last, sizes = parts[0].batches[-1], [sum(part.sizes) for part in parts]
    totals = run.following(last, events.Totalled, ENDS_AN_EVALUATION)
    is_lone = len(calls_that_share(run, last)) == len(totals) == 1
    return is_lone and totals[0].own == [sizes[0]] and totals[0].total == [sum(sizes)]


def own_part_printed(run, parts):
    """Return the verdict if rank 0 prints the result of its own part, without the others'."""
    last = parts[0].batches[-1]
    is_shared = calls_that_share(run, last)
    if is_shared and not only_sizes_are_shared(run, parts):
        return None
    verdicts = []
    for line in results_of_rank_0(run, last):
        words = [number.words for number in numbers_in(line.text)]
        is_result = any(re.search(SHARE, each) or re.search(LOSS, each) for each in words)
        text = f'{own_part(parts)} when it prints "{line.text.strip()[:60]}"'
        if is_share_of_own(run, line, parts):
            verdict = wrong
            files = run.following(last, events.Read, ENDS_AN_EVALUATION)
            if files or re.search(SENDS, run.source):
                text, verdict = f"{text}: or do files or send() bring it?", unsure
            verdicts.append(verdict(text, line.where, "rank_0_loss"))
        elif is_result and not is_shared:
            text += ": is it its own, or do files bring the rest?"
            verdicts.append(unsure(text, line.where, "rank_0_loss"))
    return worst(verdicts)


def is_share_of_own(run, line, parts):
    """Return whether a line has a number that surely is the result of rank 0's part.

    That is a share of its own samples, such as 0.9697 for 32 of 33, or of as many as the ranks have
    added up: then rank 0 divides its own number by that of all.
    """
    last, own = parts[0].batches[-1], sum(parts[0].sizes)
    added_up = [event.total for event in run.following(last, events.Totalled, ENDS_AN_EVALUATION)]
    totals = [own, *(total[0] for total in added_up if len(total) == 1 and total[0])]
    is_share = any(
        0 < number.value < number.whole and number.is_only_share_of(total)
        for number in numbers_in(line.text)
        if re.search(SHARE, number.words)
        for total in totals
    )
    return is_share or re.search(rf"\d+ ?/ ?{own}\b", line.text)


def own_data_printed(run):
    """Return the verdict if, without a DataLoader, each rank has its own inputs, and 0 prints."""
    passes = of_lowest_rank(run.passes_by_rank)
    evaluating = {data_pass.pass_number for data_pass in passes if not data_pass.is_training}
    for row in run.rows(events.Evaluated):
        same_inputs = len({event.inputs for event in row}) == 1
        if row[0].pass_number in evaluating or same_inputs or calls_that_share(run, row[0]):
            continue
        for line in results_of_rank_0(run, row[0]):
            if numbers_in(line.text):
                text = "each rank evaluates other data, and no collective brings the results "
                text += f'together when rank 0 prints "{line.text.strip()[:60]}": is it its own?'
                return unsure(text, line.where, "rank_0_loss")


def results_of_rank_0(run, last):
    """Return the lines in which rank 0 alone prints a result after this, not saying whose it is."""
    _, *of_other_ranks = run.by_rank(events.Print).values()
    elsewhere = {line.where for line in chain(*of_other_ranks)}  # each rank prints its own
    lines = run.following(last, events.Print, ENDS_AN_EVALUATION)
    lines = [line for line in lines if not re.search(SAYS_RANK, line.text)]
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
        if size and not any(map(number.is_share_of, totals)):  # of no whole number of samples
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
