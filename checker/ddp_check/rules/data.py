"""Rules about the samples that the ranks train on."""

from dataclasses import replace
from itertools import chain, pairwise

from ddp_check import events
from ddp_check.ranks import counted, differ, differing_ranks, of_lowest_rank
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, wrong

DRAWS = {  # who draws random numbers, and what they are
    "model": "random numbers in the model, such as dropout's",
    "script": "random numbers in the training loop",
}


def ranks_share_data(run):
    """the ranks share out the data"""
    rows = [row for row in run.step_rows if len(row) > 1 and any(step.inputs for step in row)]
    if run.is_sharded and (not rows or any(step.sharded > 1 for step in run.all(events.Step))):
        return not_applicable("ranks that share a model have to have the same batches")
    same_inputs = rows and all(step.inputs == row[0].inputs for row in rows for step in row)
    if same_inputs and not indices_are_shared_out(run.epochs):
        text = "in each step, all ranks train on the same batch"
        return wrong(text, rows[0][0].where, "no_sampler")
    for number, epoch in enumerate(run.epochs, 1):
        if verdict := seen_by_several(epoch):
            text = f"epoch {number}: {verdict.text}"
            return replace(verdict, text=text, where=of_lowest_rank(epoch).where)
    if verdict := never_used(run):
        return verdict
    if not run.epochs:
        if verdict := same_stream(run):
            return verdict
        each = "in each step, the ranks have different batches; " if rows else ""
        return unseen(f"{each}no DataLoader was used to train, so it is not seen which samples")


def same_stream(run):
    """Return the verdict if the ranks train on the same batches, each in steps of its own.

    A rank that draws more than the others, as for an evaluation, is ahead in the same numbers.
    """
    inputs = [
        [*chain(*(step.inputs for step in steps))] for steps in run.by_rank(events.Step).values()
    ]
    common = set.intersection(*map(set, inputs))
    batches = len(inputs[0])
    if len(inputs) > 1 and len(common) > batches / 2 and not any(map(repeated, inputs)):
        text = f"{len(common)} of {batches} batches are the same on all ranks, in other steps: add "
        return wrong(f"{text}the rank to the seed", run.all(events.Step)[0].where, "no_sampler")


def indices_are_shared_out(epochs):
    """Return whether all ranks ask for other indices of one data set in each epoch.

    If they get the same batches nevertheless, the data is constant.
    """
    for epoch in epochs:
        indices = [entry.values("base_indices") for entry in epoch.values()]
        if None in indices or any(entry.iterable for entry in epoch.values()):
            return False
        if repeated(chain(*map(set, indices))) > padding(epoch):
            return False
        if differ(epoch, "subset_checksum"):
            return False
    return bool(epochs)


def repeated(samples):
    """Return how many of these samples come again."""
    samples = list(samples)
    return len(samples) - len(set(samples))


def padding(epoch):
    """Return how many samples may come twice, so that all ranks have equally many."""
    entry, ranks = of_lowest_rank(epoch), len(epoch)
    return (ranks if entry.distributed else ranks * max(entry.sizes, default=1)) - 1


def seen_by_several(epoch):
    """Return the verdict if several ranks train on the same samples in an epoch."""
    entry = of_lowest_rank(epoch)
    known = "checksums" if entry.iterable else "base_indices"
    samples = {rank: entry.values(known) for rank, entry in epoch.items()}
    if None in samples.values():
        return unseen("the samples have no index")
    if not entry.iterable and any(map(repeated, samples.values())):
        return unseen("a rank draws samples with replacement")
    if not entry.iterable and (verdict := sets_differ(epoch)):
        return verdict
    distinct = {rank: set(of_rank) for rank, of_rank in samples.items()}
    again = repeated(chain(*distinct.values()))
    allowed = sum(map(len, samples.values())) / 4 if entry.iterable else padding(epoch)
    if again <= allowed:
        return None
    if not entry.iterable and dealt_by_data_set(epoch):
        return passed("the ranks ask for the same indices, and get other samples")
    if differing_ranks(distinct) is None:
        text = f"each rank trains on the same {counted(len(of_lowest_rank(distinct)), 'sample')}"
        return wrong(text, "", "no_sampler")
    text = f"{again} samples are seen by several ranks"
    if differ(epoch, "subset_checksum"):
        text += ": the split differs from rank to rank; give it a seed"
        return wrong(text, "", "split_differs_by_rank")
    if not entry.iterable and all(entry.is_whole for entry in epoch.values()):
        text += ": each rank takes its part of an order of its own; seed the order alike on all"
        return wrong(text, "", "rank_seeds_split_data")
    return unsure(f"{text}: each draws from all of them in an order of its own", "", "no_sampler")


def never_used(run):
    """Return the verdict if DistributedSampler leaves out samples that no rank trains on.

    The first epoch after a state was loaded may be the rest of one that was interrupted.
    """
    for epoch in run.epochs[bool(run.all(events.StateLoaded)) :]:
        entries, entry = [*epoch.values()], of_lowest_rank(epoch)
        known = [entry.distributed and entry.sample_count and entry.sizes for entry in entries]
        if not all(known) or not all(entry.is_whole for entry in entries):
            continue
        seen = set(chain(*(entry.values("indices") or () for entry in entries)))
        dropped = len(entries) * (1 + max(entry.sizes))  # the last batch of each; the sampler's
        if len(seen) < entry.sample_count - dropped:
            text = f"all ranks together see {len(seen)} of {entry.sample_count} samples in an epoch"
            text += ": DistributedSampler divides them among more ranks than there are"
            return wrong(text, entry.where)
    return None


def sets_differ(epoch):
    """Return the verdict if the same index means another sample on each rank."""
    entry = of_lowest_rank(epoch)
    tensors = differ(epoch, "tensor_checksum")
    data = differ(epoch, "dataset_checksum")
    if tensors and entry.distributed:
        text = "the data sets of the ranks differ: the same index means different samples"
        return wrong(text, "", "split_differs_by_rank")
    if data and entry.distributed:
        return unsure("each rank has a data set of its own, not for DistributedSampler: seed it")
    if data:
        return unseen("each rank has a data set of its own: are they parts of a larger one?")


def dealt_by_data_set(epoch):
    """Return whether the data set gives each rank something else for the same index.

    Augmentation changes samples, and leaves their labels as they are; equal labels of all samples
    prove nothing.
    """
    compared = False
    for field_name in ("checksums", "label_checksums"):
        checksums_by_rank = [checksum_by_index(entry, field_name) for entry in epoch.values()]
        common = set.intersection(*map(set, checksums_by_rank))
        equal = all(
            len({checksums[index] for checksums in checksums_by_rank}) == 1 for index in common
        )
        differ_by_index = len({checksums_by_rank[0][index] for index in common}) > 1
        if common and equal and (field_name == "checksums" or differ_by_index):
            return False
        compared |= bool(common)
    return compared


def checksum_by_index(entry, field_name):
    """Return {(index, number of elements): checksum}: padding changes both."""
    return {
        (index, batch.width): checksum
        for batch in entry.batches
        for index, checksum in zip(batch.base_indices, getattr(batch, field_name) or ())
    }


def order_changes(run):
    """the order changes from epoch to epoch"""
    loops = {}  # line of the loop, and what it reads -> the passes of the lowest rank
    for entry in map(of_lowest_rank, run.epochs):
        data = entry.subset_checksum, entry.tensor_checksum  # each fold has its own
        loops.setdefault((entry.where, *data), []).append(entry)
    longest = max(loops.values(), key=len, default=[])
    if len(longest) < 2:
        return read_once(longest) or unseen("fewer than two epochs with a DataLoader: run more")
    for passes in loops.values():
        if len(passes) > 1 and (verdict := same_order(run, passes)):
            return verdict
    return passed(f"{len(longest)} epochs", longest[0].where)


def read_once(passes):
    """Return the verdict on batches that are kept and repeated, as itertools.cycle does."""
    for entry in passes:
        inputs, count = [step.inputs for step in entry.steps], len(entry.batches)
        known = entry.ended and len(inputs) > count > 1 and all(inputs)
        if known and all(old == new for old, new in zip(inputs, inputs[count:])):
            text = f"steps 1 to {count} are repeated in the same order: the loader is read once"
            return wrong(text, entry.where, "no_set_epoch")


def same_order(run, passes):
    """Return the verdict on two passes with the same order."""
    entry, line = passes[0], passes[0].where
    key = "checksums" if entry.iterable else "indices"
    orders = [entry.values(key) for entry in passes]
    if None in orders or len(orders[0]) < 8:
        return unseen("the samples have no index, or there are too few", line)
    same = [number for number, pair in enumerate(pairwise(orders), 1) if pair[0] == pair[1]]
    if not same:
        return None
    text = f"epochs {same[0]} and {same[0] + 1} have the same order"
    if (
        entry.iterable
        and entry.persistent
        and len({entry.dataset_checksum for entry in passes}) > 1
    ):
        text += ": the persistent workers do not see what changes in the data set"
        return wrong(text, line, "persistent_workers")
    if entry.iterable:
        return unsure(f"{text}: is that intended?", line)
    if entry.shuffle is None:
        return unsure(f"{text}: is that what the script's own sampler is to do?", line)
    if not entry.shuffle:
        return unseen("the sampler does not shuffle: is that intended?", line)
    calls = run.of_lowest_rank(events.EpochSet)
    text += f"; set_epoch gets {calls[-1].value} last" if calls else "; set_epoch is never called"
    return wrong(text, calls[0].where if calls else line, "no_set_epoch")


def random_numbers_differ(run):
    """ranks draw different random numbers in training"""
    if not run.all(events.PassBegun) and not any(step.random for step in run.all(events.Step)):
        return unseen("no DataLoader was used, and nothing random is drawn")
    return same_samples(run) or same_draws(run) or different_draws(run)


def sample_draws(run):
    """Return the states of the generators of random samples: {rank: {(worker, source): states}}.

    Only those that all ranks have used.
    """
    states = {
        rank: {
            (event.worker, event.source): (event.before, event.after)
            for event in reversed(drawn)  # the first counts
        }
        for rank, drawn in run.by_rank(events.Drawn).items()
    }
    common = set.intersection(*map(set, states.values())) if len(states) > 1 else ()
    return {
        rank: {key: value for key, value in of_rank.items() if key in common}
        for rank, of_rank in states.items()
    }


def same_samples(run):
    """Return the verdict if samples are made with the same random numbers on all ranks."""
    draws = sample_draws(run)
    keys = list(of_lowest_rank(draws) or ())
    same = [key for key in keys if len({states[key] for states in draws.values()}) == 1]
    if not same or not run.epochs:
        return None
    sources = sorted({source for _, source in same})
    text = f"all ranks have the same augmentation: equal seeds of {', '.join(sources)}"
    cure = "add 1000 * rank to each"
    if all(worker is not None for worker, _ in same) and sources != ["generator"]:
        text, cure = f"{text} in DataLoader workers", "add 1000 * rank to torch.manual_seed"
        if "worker_init_fn" in run.source:
            cure += ", and let worker_init_fn seed by torch.initial_seed()"
    verdict = wrong if len(same) == len(keys) else unsure  # a size for a batch may be the same
    return verdict(f"{text}; {cure}", of_lowest_rank(run.epochs[0]).where, "same_augmentation")


def same_draws(run):
    """Return the verdict if the model, or the loop, draws the same random numbers on all ranks."""
    rows = [row for row in run.step_rows if all(step.random for step in row)]
    for source, what in DRAWS.items():
        drawn = [[step.random.get(source) for step in row] for row in rows]
        drawn = [values for values in drawn if None not in values]
        if drawn and len(drawn[0]) > 1 and all(len(set(values)) == 1 for values in drawn):
            text = f"all ranks draw the same {what}"
            for_samples = all(step.random_for_samples for row in rows for step in row)
            if source == "script" and for_samples and not run.is_sharded:
                text += ", several for each sample: add 1000 * rank to torch.manual_seed"
                return wrong(text, rows[0][0].where, "same_augmentation")
            text += ": should they? (seeds that differ by rank)"
            return unsure(text, rows[0][0].where, "same_augmentation")


def different_draws(run):
    """Return what was drawn, and differs; or that nothing was."""
    sources = {source for _, source in of_lowest_rank(sample_draws(run)) or ()}
    parts = ["augmentation"] if sources else []
    drawn = {source for step in run.all(events.Step) for source in step.random}
    parts += [what for source, what in DRAWS.items() if source in drawn]
    if not parts:
        return unseen("nothing random is drawn, or by a generator that the checker does not know")
    where = of_lowest_rank(run.epochs[0]).where if run.epochs else run.all(events.Step)[0].where
    return passed(f"not the same from rank to rank: {', '.join(parts)}", where)
