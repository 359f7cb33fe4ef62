"""Rules about what is printed, written and loaded."""

import os
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ddp_check import events
from ddp_check.numbers import close
from ddp_check.ranks import counted, differing_ranks, grouped, of_lowest_rank
from ddp_check.rules.base import fragile, not_applicable, passed, unseen, unsure, worst, wrong
from ddp_check.rules.gradients import losses_are_parts
from ddp_check.rules.printed import SAYS_RANK, SHARE, numbers_in

LOSS = r"(?i)(loss|nll|perplexity|\bppl)\w*[^\w\n]{0,12}$"  # before a number
NAMED_SUM = r"(?i)sum|total"  # before a number
# Somewhere before a number that cannot be computed from those of the parts of a set:
OF_A_WHOLE_SET = r"(?i)(?<![a-z])(f1|auc|roc|miou|r2|r\^2|rmse|median|corr|pearson|kappa)"
RIGHT, THE_SUM = "the mean over all ranks", "the sum over the ranks"  # what a number may be
MAX_LINES = 30  # of one place that are judged: comparing all of a long run would take minutes
COLOUR = r"\x1b\[[\d;]*m"  # an ANSI code
SYNCHRONIZES = events.Join | events.Wrap | events.Step | events.Collective
WRITES = events.Written | events.Save
# In a script that may wait for a file in a way of its own:
POLLS = r"\bsleep\(|\brecv\(|\.wait\(|(?i:file_?lock)|flock\("


def one_rank_prints(run):
    """one rank prints the progress, or each with its number"""
    printed = grouped(run.by_rank(events.Print), place_of)
    for (where, words), lines_by_rank in printed.items():
        if len(lines_by_rank) > 1 and words.strip() and not tell_their_ranks(lines_by_rank):
            ranks = " and ".join(map(str, lines_by_rank))
            example = re.sub(COLOUR, "", of_lowest_rank(lines_by_rank)[0].text).strip()[:60]
            text = f'ranks {ranks} print "{example}": is that intended?'
            return unsure(text, where, "prints_on_every_rank")


def tell_their_ranks(lines_by_rank):
    """Return whether the number of its rank stands at one and the same place in each line."""
    rows = [
        [number == str(rank) for number in re.findall(r"(?<![\d.])\d+(?!\.?\d)", line.text)]
        for rank, lines in lines_by_rank.items()
        for line in lines
    ]
    return any(map(all, zip(*rows)))  # a column in which each line has its rank's number


def place_of(line):
    """Return what is equal for lines that the same call of print() has given."""
    return line.where, pattern(line.text)


def pattern(text):
    """Return a line without colours, and without its numbers, which may differ between ranks."""
    return re.sub(r"[\d.,]+", "#", re.sub(COLOUR, "", text))


def one_rank_writes(run):
    """one rank writes each file, whole or not at all"""
    writes = file_uses(run, WRITES)
    faults = (written_by_several(run, writes), read_too_early(run, writes), part_saved(run))
    if verdict := worst([*faults, written_in_place(run)]):
        return verdict
    if not writes:
        return unseen("no file of the script's folder is written, or lines are only appended to it")
    where = next((event.where for event in run.all(events.Save)), "")
    return passed(counted(len(writes), "file"), where)


def written_in_place(run):
    """Return the verdict if torch.save writes a file under its name, not under another one."""
    renamed = {os.devnull, *(event.old_name for event in run.all(events.Written))}
    in_place = [  # unless the folder of the file is renamed
        save
        for save in run.all(events.Save)
        if save.path and not renamed & {save.path, *map(str, Path(save.path).parents)}
    ]
    paths = [save.path for save in in_place]
    for save in in_place:  # more than once, or before the last step: the script may resume from it
        if paths.count(save.path) > 1 or save.steps < len(run.steps):
            text = f"{Path(save.path).name} is written in place: a crash then leaves half a file"
            return fragile(text, save.where, "written_in_place")
    if in_place:  # once, at the end, as the result of the training
        text = f"{Path(paths[0]).name} is written in place after the last step: that matters only "
        return unseen(f"{text}if the script resumes from it", in_place[0].where)


class Use(NamedTuple):
    """A file is written, gets its name, or is read."""

    rank: int
    waits: int  # how many calls that wait for the other ranks came before
    steps: int  # that were taken before
    where: str


def file_uses(run, kinds):
    """Return the uses of each file: {path: [use]}."""
    uses = {}
    for rank, events_of_rank in run.events_by_rank.items():
        waits = steps = 0
        for event in events_of_rank:
            steps += isinstance(event, events.Step)
            waits += isinstance(event, SYNCHRONIZES)
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
    """Return the verdict if several ranks write the same file: at once, or at other times.

    Before the first step, that may be a copy of the configuration, equal on all ranks.
    """
    verdicts = []
    for path, writes in writes_by_path.items():
        steps_by_rank, ranks_by_wait = {}, {}
        for write in writes:
            steps_by_rank.setdefault(write.rank, set()).add(write.steps)
            ranks_by_wait.setdefault(write.waits, set()).add(write.rank)
        text = f"ranks {', '.join(map(str, steps_by_rank))} write {Path(path).name}"
        # The line is that of the highest rank, which should leave the file to the lowest.
        where = next(write.where for write in writes if write.rank == max(steps_by_rank))
        at_once = [write for write in writes if len(ranks_by_wait[write.waits]) > 1]
        if at_once:  # nothing makes one rank wait for another
            text += " at the same time"
            verdict = wrong
            if not any(write.steps for write in at_once):
                text, verdict = f"{text}: do they write the same?", unsure
        elif run.returncode == 0 and differing_ranks(steps_by_rank):
            text += " after other steps: is that intended?"  # each after steps of its own
            verdict = unsure
        else:
            continue
        verdicts.append(verdict(text, where, "every_rank_saves"))
    return worst(verdicts)


def part_saved(run):
    """Return the verdict if one rank alone saves its part of a sharded model."""
    of_parts = {
        rank: [save for save in saves if save.shard]
        for rank, saves in run.by_rank(events.Save).items()
    }
    saving = [rank for rank, saves in of_parts.items() if saves]
    if len(saving) == 1 < run.world_size:
        save = of_parts[saving[0]][0]
        text = f"rank {saving[0]} alone saves, and only its own part of {save.shard}: gather it"
        return wrong(text, save.where, "recipes/fsdp2")


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


def sums_begin_anew(run):
    """what is added up over the ranks is not added up again"""
    if not any(call.sums for call in run.all(events.Collective)):
        return unseen("nothing is added up over the ranks")
    for event in run.all(events.SumKept):
        text = f"the sum of all {run.world_size} ranks stays in the tensor, and is added up again "
        text += "by each of them the next time: set it to 0, or add up a copy"
        return wrong(text, event.where, "rank_0_loss")


def gathered_parts_are_apart(run):
    """what is gathered is told apart by rank"""
    if not any("gather" in call.name for call in run.all(events.Collective)):
        return unseen("nothing is gathered")
    for event in run.all(events.PartsOverwritten):
        text = "all parts go into one tensor, which keeps the last rank's: [tensor] * N is the "
        return wrong(f"{text}same tensor N times", event.where)
    for event in run.all(events.TargetsOfRank0):
        text = "each rank's samples are looked for among those of all as if it were rank 0: add "
        text += "the rank times their number to the targets"
        return wrong(text, event.where, "recipes/contrastive")


def loaded_names_fit(run):
    """a model has some of the names that it loads"""
    if not any(event.by_model for event in run.all(events.StateLoaded)):
        return unseen("no model loads a state")
    for event in run.all(events.NothingLoaded):
        text = f"with strict=False, nothing is loaded: the model has no {event.name}, nor any other"
        page = "module_prefix_saved" if event.name.startswith("module.") else ""
        return wrong(text, event.where, page)


def printed_loss_is_of_all(run):
    """a printed loss is that of all ranks"""
    if run.is_sharded and not any(step.inputs for step in run.all(events.Step)):
        return not_applicable("ranks that share a model have the same loss")
    numbers_by_place = {}  # (line, words before) -> [(number, its `meaning_of`)]
    right, own = [], []  # lines that print a loss of all ranks, and one of which no other rank knew
    for line, windows, knows_own_alone in printed_after_steps(run):
        for number in numbers_in(line.text):
            meaning = meaning_of(number, windows)
            if meaning != RIGHT and re.search(SAYS_RANK, number.words):
                meaning = None  # as if it were unknown: it is meant to be that of one rank
            elif re.search(LOSS, number.words) and knows_own_alone:
                own.append(line.where)
            if meaning == RIGHT:
                right.append(line.where)
            place = line.where, pattern(number.words)
            numbers_by_place.setdefault(place, []).append((number.shown, meaning))
    for (where, words), numbers in numbers_by_place.items():
        if len(numbers) < 2 or any(meaning in (None, RIGHT) for _, meaning in numbers):
            continue  # once may be chance; and one that is right, or unknown, clears the place
        shown, meaning = numbers[0]
        is_sum = meaning.startswith(THE_SUM)
        if is_sum and losses_are_parts(run):
            continue  # their sum is the mean over all samples
        verdict = wrong if is_sum and not re.search(NAMED_SUM, words) else unsure
        return verdict(f"{shown} is {meaning}", where, "rank_0_loss")
    if verdict := sum_is_printed(run, LOSS, right):
        return verdict
    if own and run.world_size > 1:
        text = "no collective comes before this loss: is it that of rank 0?"
        return unsure(text, own[0], "rank_0_loss")
    if right:
        return passed(counted(len(set(right)), "number"), right[0])
    return unseen("no printed number could be compared with the losses of the steps")


def printed_after_steps(run):
    """Yield each line that rank 0 prints after a step, with what tells the meaning of its numbers.

    That is, the windows of steps of which a number may be the mean, see `meaning_of`, and whether
    rank 0 knows no losses but its own.
    """
    passes = {each.pass_number: each for each in of_lowest_rank(run.passes_by_rank)}
    rows = run.rows(events.Step)
    equal_losses = all(step.losses == row[0].losses for row in rows for step in row)
    steps = steps_before_epoch = 0
    steps_at_reduction = -1  # before the latest reduction; -1: there was none
    latest_pass = None  # that has given a batch since the last step
    printed = Counter()  # how many lines of each place
    for event in of_lowest_rank(run.events_by_rank):
        match event:
            case events.Step():
                steps, latest_pass = steps + 1, None
            case events.Collective(in_model=False) if event.sums or "gather" in event.name:
                steps_at_reduction = steps
            case events.PassBegun() if passes[event.pass_number].is_training:
                steps_before_epoch = steps
            case events.Batch():
                latest_pass = passes.get(event.pass_number)
            case events.Print() if steps and printed[place := place_of(event)] < MAX_LINES:
                printed[place] += 1
                until_now = rows[:steps]
                # The latest step, the epoch so far, all steps: a number may be a mean over any.
                windows = [until_now[-1:], until_now[steps_before_epoch:], until_now]
                # Rank 0 may know the losses of all by a reduction, perhaps one step ago, or because
                # it has itself evaluated all samples.
                reduced = steps_at_reduction >= steps - 1
                all_seen = latest_pass and sum(latest_pass.sizes) == latest_pass.sample_count
                knows_own_alone = not (reduced or all_seen or equal_losses)
                yield event, windows, knows_own_alone


def meaning_of(number, windows):
    """Return what a printed number is: `RIGHT`, a fault in words, or None if that is not known.

    A window is a list of steps, each a tuple of the ranks' events, of which it may be the mean. If
    the number fits several values, one that is right counts, or else the first.
    """
    if number.digits < 3 or not number.value or number.percent:
        return None
    meanings = [
        meaning
        for rows in windows
        for value, meaning in possible_values(rows)
        if number.is_printed_for(value)
    ]
    return RIGHT if RIGHT in meanings else next(iter(meanings), None)


def possible_values(rows):
    """Return what a number that is printed after these steps may be: [(value, what that is)].

    Faults: a part alone; a part divided, not added up; a sum that is not divided; a mean of means.
    """
    steps = [step for row in rows for step in row]
    if not steps or len(rows[0]) < 2 or not all(step.losses for step in steps):
        return []
    ranks, of_rank_0 = len(rows[0]), [row[0] for row in rows]
    over_samples, over_batches = mean_over_samples(steps), mean_over_batches(steps)
    values = [(over_samples, RIGHT)]
    divisors = [divisor for step in steps for divisor in step.divisors]
    are_divided = divisors and all(close(divisor, ranks) for divisor in divisors)
    if are_divided or any(step.loss_reduced for step in steps):
        return values  # these losses are no means, which another rule tells
    own = f"the loss of rank 0, that of all ranks is {over_batches:.6g}"
    divided = "the loss of rank 0 divided by the number of ranks, without those of the others"
    for value in (mean_over_samples(of_rank_0), mean_over_batches(of_rank_0)):
        values += [(value, own), (value / ranks, divided)]
    if len(rows) != ranks:  # else it is also the sum of the means of all batches
        values.append((ranks * over_batches, f"{THE_SUM}, their mean is {over_batches:.6g}"))
    text = f"a mean over batches of unequal size, over samples it is {over_samples:.6g}"
    values.append((over_batches, text))
    return values


def loss_of(step):
    """Return the loss of a step: the last, or the sum of N micro-batches, each divided by N."""
    by_count = [divisor for divisor in step.divisors if close(divisor, len(step.losses))]
    averages = len(by_count) > 1  # each of the micro-batches has such a divisor; one may be chance
    return sum(step.losses) if averages else step.losses[-1]


def mean_over_batches(steps):
    """Return the mean of the losses in these steps, each of which counts once."""
    return sum(map(loss_of, steps)) / len(steps)


def mean_over_samples(steps):
    """Return the mean of the losses in these steps, weighted by samples if all are known."""
    samples = sum(step.sample_count for step in steps)
    if not all(step.sample_count for step in steps):  # some are fetched ahead
        return mean_over_batches(steps)
    return sum(step.sample_count * loss_of(step) for step in steps) / samples


def sum_is_printed(run, words, right=()):
    """Return the verdict if rank 0 prints, after these words, a sum of what each rank has alone.

    Such a sum is right only if each rank has divided its own part by a number of all. It is surely
    wrong if shares of samples add up to more than 1. Of shares, their mean is looked for, too.

    words: LOSS or SHARE
    right: lines that print a mean over all ranks
    """
    rows = run.rows(events.Totalled) if run.world_size > 1 else ()
    for row in rows:
        lines = run.following(row[0], events.Print, events.Totalled)
        numbers = [(number, line.where) for line in lines for number in numbers_in(line.text)]
        for own, total in zip(zip(*(event.own for event in row)), row[0].total):
            if not is_sum_of_fractions(own, total):
                continue
            for number, where in numbers:
                if verdict := verdict_on_sum(number, own, total, words, where in right):
                    return replace(verdict, where=where)


def verdict_on_sum(number, own, total, words, is_known):
    """Return the verdict on a number that is printed, if it is this total of what ranks have alone.

    is_known: it is a mean over all ranks
    """
    factor = 100 if number.percent else 1
    parts = " and ".join(f"{factor * value:.4g}" for value in own[:2])
    of_shares = words == SHARE
    is_mean = number.digits > 2 and number.is_printed_for(total / len(own))
    if of_shares and is_mean and re.search(OF_A_WHOLE_SET, number.words):
        text = f"{number.shown} is the mean of {parts}, each of one rank's samples: of all, it is "
        return unsure(f"{text}another", "", "mean_of_means")
    is_meant = re.search(words, number.words) and not re.search(NAMED_SUM, number.words)
    if not is_meant or is_known or not number.is_printed_for(total):
        return None
    text = f"{number.shown} is {THE_SUM}, of {parts}"
    if of_shares and all(0 <= value <= 1 for value in own) and total > 1:
        return wrong(f"{text}: divide it by {len(own)}", "", "rank_0_loss")
    return unsure(f"{text}: is each already divided by what all ranks have?", "", "rank_0_loss")


def is_sum_of_fractions(own, total):
    """Return whether each rank has added up one number that is not whole."""
    return not all(value % 1 == 0 for value in own) and close(total, sum(own), 1e-4)
