"""Rules about the samples that the ranks train on and evaluate."""

from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

from ddp_check import events
from ddp_check.ranks import counted, differ, lowest
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong


def ranks_share_data(run):
    """the ranks share out the data"""
    rows = [row for row in run.step_rows if len(row) > 1 and any(step.inputs for step in row)]
    if run.is_sharded and (not rows or any(step.sharded > 1 for step in run.all(events.Step))):
        yield not_applicable("ranks that share a model have to have the same batches")
    if rows and all(step.inputs == row[0].inputs for row in rows for step in row):
        text = "in each step, all ranks train on the same batch"
        yield wrong(text, rows[0][0].where, "no_sampler")
    found = run.epochs
    for number, epoch in enumerate(found, 1):
        for verdict in shared(epoch):
            text = f"epoch {number}: {verdict.text}"
            yield replace(verdict, text=text, where=lowest(epoch).where)
    if not (rows or found):
        yield unseen("no DataLoader was used to train, nor a wrapped model")


def seen_twice(parts):
    """Return how many samples are seen again: by another rank, or by the same in a list."""
    counts = Counter(chain(*parts))
    return counts.total() - len(counts)


def shared(epoch):
    """Yield the verdict if several ranks train on the same samples in an epoch."""
    one, ranks = lowest(epoch), len(epoch)
    found = {rank: of.samples("samples" if one.iterable else "base") for rank, of in epoch.items()}
    if None in found.values():
        yield unseen("the samples have no index")
    if not one.iterable and any(seen_twice([of]) for of in found.values()):
        yield unseen("a rank draws samples with replacement")
    if not one.iterable:
        yield from sets_differ(epoch)
    seen = {rank: set(of) for rank, of in found.items()}
    padding = (ranks if one.distributed else ranks * max(one.sizes, default=1)) - 1
    most = sum(map(len, found.values())) / 4 if one.iterable else padding
    if (twice := seen_twice(seen.values())) <= most:
        return
    if not one.iterable and dealt_by_data_set(epoch):
        yield passed("the ranks ask for the same indices, and get other samples")
    if differ(seen) is None:
        text = f"each rank trains on the same {counted(len(lowest(seen)), 'sample')}"
        yield wrong(text, "", "no_sampler")
    text = f"{twice} samples are seen by several ranks"
    if differ({rank: of.part for rank, of in epoch.items()}):
        text += ": the split differs from rank to rank; give it a seed"
        yield wrong(text, "", "split_differs_by_rank")
    if not one.iterable and all(of.is_whole for of in epoch.values()):
        yield wrong(text, "", "rank_seeds_split_data")
    yield unsure(f"{text}: each draws from all of them in an order of its own", "", "no_sampler")


def sets_differ(epoch):
    """Yield the verdict if the same index means another sample on each rank."""
    one = lowest(epoch)
    if differ({rank: of.tensors for rank, of in epoch.items()}) and one.distributed:
        text = "the data sets of the ranks differ: the same index means different samples"
        yield wrong(text, "", "split_differs_by_rank")
    own = differ({rank: of.data for rank, of in epoch.items()})
    if own and one.distributed:
        yield unsure("each rank has a data set of its own, not for DistributedSampler: seed it")
    if own:
        yield unseen("each rank has a data set of its own: are they parts of a larger one?")


def dealt_by_data_set(epoch):
    """Return whether the data set gives each rank something else for the same index."""
    known = False
    for key in ("samples", "labels"):  # augmentation leaves the labels as they are
        found = [dict(zip(of.samples("base"), of.samples(key) or ())) for of in epoch.values()]
        common = set.intersection(*map(set, found))
        alike = all(len({of[index] for of in found}) == 1 for index in common)
        several = key == "samples" or len({found[0][index] for index in common}) > 1
        if common and alike and several:
            return False
        known |= bool(common)
    return known


def order_changes(run):
    """the order changes from epoch to epoch"""
    loops = {}  # line of the loop -> the passes of the lowest rank
    for epoch in map(lowest, run.epochs):
        loops.setdefault(epoch.where, []).append(epoch)
    most = max(loops.values(), key=len, default=[])
    if len(most) < 2:
        for one in most:
            inputs, count = [step.inputs for step in one.steps], len(one.batches)
            known = one.ended and len(inputs) > count > 1 and all(inputs)
            if known and all(old == new for old, new in zip(inputs, inputs[count:])):
                text = f"steps 1 to {count} are repeated in the same order: the loader is read once"
                yield wrong(text, one.where, "no_set_epoch")
        yield unseen("fewer than two epochs with a DataLoader: run more")
    for of in loops.values():
        if len(of) > 1:
            yield from same_order(run, of)
    yield passed(f"{len(most)} epochs", most[0].where)


def same_order(run, of):
    one, line = of[0], of[0].where
    orders = [one.samples("samples" if one.iterable else "indices") for one in of]
    if None in orders or len(orders[0]) < 8:
        yield unseen("the samples have no index, or there are too few", line)
    same = [at for at, (order, after) in enumerate(pairwise(orders), 1) if order == after]
    if not same:
        return
    text = f"epochs {same[0]} and {same[0] + 1} have the same order"
    if one.iterable and one.persistent and len({one.data for one in of}) > 1:
        text += ": the persistent workers do not see what changes in the data set"
        yield wrong(text, line, "persistent_workers")
    if one.iterable:
        yield unsure(f"{text}: is that intended?", line)
    if not one.shuffle:
        yield unseen("the sampler does not shuffle: is that intended?", line)
    told = lowest(run.by_rank(events.EpochSet))
    text += f"; set_epoch gets {told[-1].value} last" if told else "; set_epoch is never called"
    yield wrong(text, told[0].where if told else line, "no_set_epoch")


def random_numbers_differ(run):
    """ranks draw different random numbers in training"""
    found = run.epochs
    if not found:
        yield unseen("no DataLoader was used to train")
    drawn = {  # states of the generators of random samples: {rank: {source: (before, after)}}
        rank: {(one.worker, one.source): (one.before, one.after) for one in reversed(of)}
        for rank, of in run.by_rank(events.Drawn).items()
    }
    common = set.intersection(*map(set, drawn.values())) if len(drawn) > 1 else ()
    same = [key for key in common if len({of[key] for of in drawn.values()}) == 1]
    if same:
        sources = sorted({source for _, source in same})
        text = f"all ranks have the same augmentation: equal seeds of {', '.join(sources)}"
        cure = "add 1000 * rank to each"
        if all(worker is not None for worker, _ in same) and sources != ["generator"]:
            text, cure = f"{text} in DataLoader workers", "add 1000 * rank to torch.manual_seed"
            if "worker_init_fn" in run.text:
                cure += ", and let worker_init_fn seed by torch.initial_seed()"
        judge = wrong if len(same) == len(common) else unsure  # a size for a batch may be the same
        yield judge(f"{text}; {cure}", lowest(found[0]).where, "same_augmentation")
    for epoch in found:
        numbers = {
            rank: [tuple(sorted(step.random.items())) for step in of.steps]
            for rank, of in epoch.items()
        }
        if len(epoch) > 1 and any(len(set(of)) > 1 for of in numbers.values()):
            where = lowest(epoch).steps[0].where
            if differ(numbers):
                yield passed("dropout or augmentation differs from rank to rank", where)
            judge, what = wrong, "augmentation"
            if any("model" in step.random for step in run.all(events.Step)) or not run.all(
                events.Wrap
            ):
                judge, what = unsure, "dropout or augmentation: should they?"
            yield judge(f"all ranks have the same {what}", where, "same_augmentation")
    if not common:
        yield unseen("nothing is drawn, or by a generator that the checker does not know")
    yield passed("augmentation differs from rank to rank", lowest(found[0]).where)


def evaluations(run):
    """Return the evaluations: {size of a data set and line: [one pass of each rank]}.

    Without those on the training set, and, in a run that failed, those that a rank did not reach.
    """
    looked, found = {}, run.passes_by_rank
    every = [one for of in found.values() for one in of]
    trained = {(one.data, one.part) for one in every if one.is_training}
    whole = {(one.data, one.part) for one in every if one.is_whole}
    for rank, of in found.items():
        for one in of:
            same = one.data, one.part
            left = same not in whole and one.seen(events.Looked)  # an evaluation that ends early
            if (one.is_whole or left) and one.length and same not in trained:
                looked.setdefault((one.length, one.where), {}).setdefault(rank, []).append(one)
    least = 1 if run.returncode == 0 else len(run.events_by_rank)
    return {key: list(zip(*of.values())) for key, of in looked.items() if len(of) >= least}


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    looked = evaluations(run)
    if not looked:
        yield unseen("no DataLoader was used without training")
    for (total, where), rows in looked.items():
        left = [  # where all ranks evaluate the same few samples, which this may leave out
            row
            for row in chain(*looked.values())
            if row[0].data == rows[0][0].data and row[0].length < total and alike(row, "base")
        ]
        for row in rows:
            for verdict in missed(row, left[:1], total, len(run.events_by_rank)):
                yield replace(verdict, where=where, page="padded_evaluation")
    total, where = max(looked)
    yield passed(f"{total} samples", where)


def alike(row, key="indices"):
    """Return whether all ranks evaluate the same known samples, perhaps in other orders."""
    seen = [one.samples(key) for one in row]
    return None not in seen and len({tuple(sorted(of)) for of in seen}) == 1


def missed(row, left, total, ranks):
    seen = [one.samples() for one in row]
    if None in seen or len({one.part for one in row}) > 1:
        yield unseen("the samples have no index, or each rank evaluates a part of its own")
    if all(sorted(of) == list(range(total)) for of in seen):
        return  # each of these ranks evaluates the whole set
    if not alike(row) and (twice := seen_twice(seen)):
        yield from counted_twice(row, twice, total)
        return
    counts = {index for one in row for index in one.samples("base")}
    whole = counts.union(*(rest[0].samples("base") for rest in left))
    if len(counts) < total and len(whole) != total:
        lost = row[0].drop_last or (row[0].distributed and len(row) < ranks)
        found = [event.values for one in row for event in one.seen(events.Totalled)]
        lost &= not any(total in of for of in found)  # the rest is counted elsewhere
        lost &= all(one.is_whole for one in row)
        text = f"it sees {len(counts)} of {total} samples"
        yield wrong(text) if lost else unsure(f"{text}: is that intended?")
    if row[0].distributed and not left:
        yield unseen(f"{total} is divisible by {len(row)}; otherwise DistributedSampler would pad")


def counted_twice(row, twice, total):
    """Yield what is wrong with a padded evaluation, unless the padding is cut off."""
    loaded = sum(len(one.samples()) for one in row)
    text = f"{loaded} samples, {loaded - twice} of them distinct, of {total}"
    orders = {cut.order for one in row for cut in one.seen(events.Cut) if cut.dropped == twice}
    counts = [count for one in row for count in one.seen(events.Counted)]
    calls = [[call for call in one.seen(events.Collective) if not call.in_model] for one in row]
    gathers = [sum("gather" in call.name for call in of) for of in calls]
    if row[0].distributed and "blocks" in orders:
        lost = "what is gathered is in blocks, not in the data set's order, when its end is cut"
        yield (wrong if max(gathers) == 1 else unsure)(f"{lost} off: some are lost")
    if row[0].distributed and "another" in orders:
        yield unsure("what is gathered is sorted when its end is cut off: is that the padding?")
    if orders or any(count.length == loaded - twice for count in counts):
        return
    first = [[call.sums for call in of if call.sums or "gather" in call.name][:1] for of in calls]
    if not any(gathers) or all(of == [True] for of in first):  # added up before it is gathered
        totals = {n for one in row for event in one.seen(events.Totalled) for n in event.values}
        if loaded - twice in totals and loaded not in totals:
            yield unsure(f"it loads {text}: are the extra ones left out?")
        yield wrong(f"it counts {text}")
    if any(count.reduced and count.length == loaded for count in counts):
        yield wrong(f"it counts {text}: nothing is cut off after the gather")
    yield unsure(f"it loads {text}: are the extra ones dropped after the gather?")
