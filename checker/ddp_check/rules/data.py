"""Rules about the samples that the ranks train on and evaluate."""

from collections import Counter
from itertools import chain, pairwise

from ddp_check import events
from ddp_check.passes import epochs, passes
from ddp_check.ranks import counted, differ, lowest
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong

SEED = {"torch": "torch.manual_seed", "random": "random.seed", "numpy": "np.random.seed"}
SEED["generator"] = "generator.manual_seed"  # of one that the data set owns


def ranks_share_data(run):
    """the ranks share out the data"""
    rows = [row for row in run.step_rows if len(row) > 1 and any(step.inputs for step in row)]
    alike = [all(step.inputs == row[0].inputs for step in row) for row in rows]
    if run.is_sharded and (not rows or any(step.sharded > 1 for step in run.all(events.Step))):
        yield not_applicable("ranks that share a model have to have the same batches")
    if rows and all(alike):
        text = "in each step, all ranks train on the same batch"
        yield wrong(text, rows[0][0].where, "no_sampler")
    found = epochs(run)
    for number, epoch in enumerate(found, 1):
        judge = shared_stream if lowest(epoch).iterable else shared_indices
        for verdict in judge(epoch):
            verdict.text, verdict.where = f"epoch {number}: {verdict.text}", lowest(epoch).where
            yield verdict
    if found:
        known = lowest(found[0]).samples("base") or lowest(found[0]).samples("samples")
        total = len({one for of in found[0].values() for one in of.samples("base") or known})
        text = f"{counted(len(found), 'epoch')} of {total} samples"
        yield passed(text, lowest(found[0]).where)
    if not rows:
        yield unseen("no DataLoader was used to train, nor a wrapped model")
    if any(alike):
        text = f"in {sum(alike)} of {len(rows)} steps, all ranks train on the same batch"
        yield unsure(text, rows[alike.index(True)][0].where, "no_sampler")
    text = f"in {counted(len(rows), 'step')}, the ranks train on different batches"
    yield passed(text, rows[0][0].where)


def shared_stream(epoch):
    seen = {rank: of.samples("samples") for rank, of in epoch.items()}
    if None in seen.values():
        yield unseen("the samples of an iterable data set have no index")
    yield from all_the_same(seen)
    twice = seen_twice(map(set, seen.values()))
    if twice > sum(map(len, seen.values())) / 4:
        yield unsure(f"{twice} samples are seen by several ranks", "", "no_sampler")


def all_the_same(seen):
    if len(seen) > 1 and differ({rank: set(of) for rank, of in seen.items()}) is None:
        text = f"each rank trains on the same {counted(len(set(lowest(seen))), 'sample')}"
        yield wrong(text, "", "no_sampler")


def seen_twice(parts):
    """Return how many samples are seen again: by another rank, or by the same in a list."""
    counts = Counter(chain(*parts))
    return counts.total() - len(counts)


def shared_indices(epoch):
    one, ranks = lowest(epoch), len(epoch)
    seen = {rank: of.samples("base") for rank, of in epoch.items()}
    if None in seen.values():
        yield unseen("the sampler does not return integer indices")
    if any(seen_twice([of]) for of in seen.values()):
        yield unseen("a rank draws samples with replacement")
    if differ({rank: of.tensors for rank, of in epoch.items()}) and one.distributed:
        text = "the data sets of the ranks differ: the same index means different samples"
        yield wrong(text, "", "split_differs_by_rank")
    if differ({rank: of.data for rank, of in epoch.items()}):
        if one.distributed:
            why = "DistributedSampler needs the same on all; is it random and unseeded?"
            yield unsure(f"each rank has a data set of its own: {why}")
        yield unseen("each rank has a data set of its own: are they parts of a larger one?")
    twice = seen_twice(seen.values())
    largest = max((len(batch.indices) for batch in one.batches), default=1)
    if twice < (ranks if one.distributed else ranks * largest):  # no more than padding
        return
    if dealt_by_data_set(epoch):
        yield passed("the ranks ask for the same indices, and get other samples")
    yield from all_the_same(seen)
    text = f"{twice} samples are seen by several ranks"
    if all(of.is_whole for of in epoch.values()):
        yield wrong(text, "", "rank_seeds_split_data")
    text += ": each draws from all of them in an order of its own"
    yield unsure(text, "", "no_sampler")


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
    for epoch in epochs(run):
        loops.setdefault(lowest(epoch).where, []).append(lowest(epoch))
    if not loops:
        yield unseen("no DataLoader was used to train")
    yield from repeated(run)
    where, most = max(loops.items(), key=lambda item: len(item[1]))
    if len(most) < 2:
        yield unseen("fewer than two epochs: run more")
    for line, of in loops.items():
        if len(of) > 1:
            yield from same_order(run, line, of)
    yield passed(f"{len(most)} epochs", where)


def repeated(run):
    """Yield the verdict if the batches of the first pass come again after its end, as by cycle."""
    for of in passes(run).values():
        trained = [one for one in of if one.steps]
        if len(trained) != 1 or not trained[0].ended:
            return
        one = trained[0]
        inputs, count = [step.inputs for step in one.steps], len(one.batches)
        known = len(inputs) > count > 1 and all(inputs)
        if known and all(a == b for a, b in zip(inputs, inputs[count:])):
            text = f"steps 1 to {count} are repeated in the same order: the loader is read once"
            yield wrong(text, one.where, "no_set_epoch")


def same_order(run, line, of):
    orders = [one.samples("samples" if one.iterable else "indices") for one in of]
    if None in orders or len(orders[0]) < 8:
        yield unseen("the samples have no index, or there are too few", line)
    same = [at for at, (order, after) in enumerate(pairwise(orders), 1) if order == after]
    if not same:
        return
    text = f"epochs {same[0]} and {same[0] + 1} have the same order"
    if of[0].iterable and of[0].persistent and len({one.data for one in of}) > 1:
        text += ": the persistent workers do not see what changes in the data set"
        yield wrong(text, line, "no_set_epoch")
    if of[0].iterable:
        yield unsure(f"{text}: is that intended?", line)
    if not of[0].shuffle:
        yield unseen("the sampler does not shuffle: is that intended?", line)
    told = lowest(run.of(events.EpochSet))
    text += f"; set_epoch gets {told[-1].value} last" if told else "; set_epoch is never called"
    yield wrong(text, told[0].where if told else line, "no_set_epoch")


def random_numbers_differ(run):
    """ranks draw different random numbers in training"""
    found = epochs(run)
    if not found:
        yield unseen("no DataLoader was used to train")
    drawn = {  # states of the generators of random samples: {rank: {source: (before, after)}}
        rank: {(one.worker, one.source): (one.before, one.after) for one in reversed(of)}
        for rank, of in run.of(events.Drawn).items()
    }
    common = set.intersection(*map(set, drawn.values())) if len(drawn) > 1 else ()
    same = [key for key in common if len({of[key] for of in drawn.values()}) == 1]
    if same:
        sources = sorted({source for _, source in same})
        seeds = [SEED[source] for source in sources]
        judge, text = wrong, "all ranks have the same augmentation"
        if len(same) < len(common):  # a size that all ranks draw for a batch, say, would be right
            judge, text = unsure, "do all ranks have the same augmentation"
        if all(worker is not None for worker, _ in same):
            text, seeds = f"{text} in DataLoader workers", [SEED["torch"]]
        text += f": equal seeds of {', '.join(sources)}; call "
        text += ", ".join(f"{seed}(epoch + 1000 * rank)" for seed in seeds)
        yield judge(text, lowest(found[0]).where, "same_augmentation")
    for epoch in found:
        numbers = {rank: [step.random for step in of.steps] for rank, of in epoch.items()}
        if len(epoch) > 1 and any(len(set(of)) > 1 for of in numbers.values()):
            where = lowest(epoch).steps[0].where
            if differ(numbers):
                yield passed("dropout or augmentation differs from rank to rank", where)
            text = "all ranks have the same dropout: should they?"
            if any(step.dropout for step in run.all(events.Step)):  # some libraries want that
                yield unsure(text, where, "same_augmentation")
            if not run.all(events.Wrap):  # where the model begins is not seen
                yield unsure(text.replace(":", " or augmentation:"), where, "same_augmentation")
            yield wrong("all ranks have the same augmentation", where, "same_augmentation")
    if common:
        yield passed("augmentation differs from rank to rank", lowest(found[0]).where)
    yield unseen("draws from no global generator; one that the data set owns is not seen")


def evaluations(run):
    """Return the evaluations: {size of a data set and line: [one pass of each rank]}.

    Without those on the training set: they only show how training goes. In a run that failed, also
    without those that some ranks did not come to.
    """
    looked, found = {}, passes(run)
    trained = {(one.data, one.part) for of in found.values() for one in of if one.is_training}
    for rank, of in found.items():
        for one in of:
            if one.is_whole and one.length and (one.data, one.part) not in trained:
                key = one.length, one.where
                looked.setdefault(key, {}).setdefault(rank, []).append(one)
    least = 1 if run.returncode == 0 else len(run.ranks)
    return {key: list(zip(*of.values())) for key, of in looked.items() if len(of) >= least}


def each_sample_is_evaluated_once(run):
    """the evaluation sees each sample once"""
    looked = evaluations(run)
    if not looked:
        yield unseen("no DataLoader was used without training")
    text = ""
    for (total, where), rows in looked.items():
        left = [  # where all ranks evaluate the same few samples, which this may leave out
            row
            for row in chain(*looked.values())
            if row[0].data == rows[0][0].data and row[0].length < total and alike(row, "base")
        ]
        for row in rows:
            for verdict in missed([row, *left[:1]], total, len(run.ranks)):
                verdict.where, verdict.page = where, "padded_evaluation"
                yield verdict
            if padding(row) and not text:
                text = f"; its padding of {padding(row)} is dropped after a gather"
    total, where = max(looked)
    yield passed(f"{total} samples{text}", where)


def alike(row, key="indices"):
    """Return whether all ranks evaluate the same known samples, perhaps in other orders."""
    seen = [one.samples(key) for one in row]
    return None not in seen and len({tuple(sorted(of)) for of in seen}) == 1


def padding(row):
    """Return how many samples an evaluation by all ranks loads more than once."""
    seen = [one.samples() for one in row]
    return 0 if None in seen or alike(row) else seen_twice(seen)


def missed(rows, total, ranks):
    row, *left = rows
    seen = [one.samples() for one in row]
    if None in seen or len({one.part for one in row}) > 1:
        yield unseen("the samples have no index, or each rank evaluates a part of its own")
    if all(sorted(of) == list(range(total)) for of in seen):
        return  # each of these ranks evaluates the whole set
    if twice := padding(row):
        yield from counted_twice(row, twice, total)
        return
    counts = {index for one in row for index in one.samples("base")}
    whole = counts.union(*(other[0].samples("base") for other in left))
    if len(counts) < total and len(whole) != total:
        lost = row[0].drop_last or (row[0].distributed and len(row) < ranks)
        lost &= not any(total in one.totals for one in row)  # the rest is counted elsewhere
        text = f"it sees {len(counts)} of {total} samples"
        yield wrong(text) if lost else unsure(f"{text}: is that intended?")
    if row[0].distributed and not left:
        text = f"{total} is divisible by {len(row)}; otherwise DistributedSampler would pad"
        yield unseen(text)


def counted_twice(row, twice, total):
    """Yield what is wrong with a padded evaluation, unless the padding is cut off."""
    loaded = sum(len(one.samples()) for one in row)
    text = f"{loaded} samples, {loaded - twice} of them distinct, of {total}"
    orders = {cut.order for one in row for cut in one.cuts if cut.dropped == twice}
    counts = [count for one in row for count in one.counted]
    if row[0].distributed and "blocks" in orders:
        lost = "what is gathered is in blocks, not in the data set's order, when its end is cut off"
        alone = max(one.gathers for one in row) == 1
        yield wrong(lost) if alone else unsure(f"{lost}: with more ranks, some are lost")
    if row[0].distributed and "another" in orders:
        yield unsure("what is gathered is sorted when its end is cut off: is that the padding?")
    if orders or any(count.length == loaded - twice for count in counts):
        return
    if not any(one.gathers for one in row) or all(one.added_up for one in row):
        totals = set().union(*(one.totals for one in row))
        if loaded - twice in totals and loaded not in totals:
            yield unsure(f"it loads {text}: are the extra ones left out?")
        yield wrong(f"it counts {text}")
    if any(count.reduced and count.length == loaded for count in counts):
        yield wrong(f"it counts {text}: nothing is cut off after the gather")
    yield unsure(f"it loads {text}: are the extra ones dropped after the gather?")


def held_out_is_not_trained_on(run):
    """no sample is both trained on and evaluated"""
    trained, parts = {}, {}  # checksum of a data set -> indices; and -> rank -> part of it
    for epoch in epochs(run):
        for rank, one in epoch.items():
            trained.setdefault(one.data, set()).update(one.samples("base") or ())
            parts.setdefault(one.data, {}).setdefault(rank, one.part)
    apart = ""
    for (_, where), rows in evaluations(run).items():
        for one in (one for row in rows for one in row if one.data in trained):
            seen = set(one.samples("base") or ())
            apart, both = where, seen & trained[one.data]
            text = f"{len(both)} of the {len(seen)} samples of an evaluation are also trained on"
            if both and differ(parts[one.data]):
                text += ": the split differs from rank to rank; give it a seed"
                yield wrong(text, where, "split_differs_by_rank")
            if both:
                judge = wrong if both < seen else unsure
                yield judge(f"{text}: is that intended?", where)
    if apart:
        yield passed("they are parts of one data set that do not overlap", apart)
    yield unseen("training and evaluation do not use parts of one data set")
