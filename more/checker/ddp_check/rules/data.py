"""Rules about the samples that the ranks train on."""

from itertools import pairwise

from ddp_check import events
from ddp_check.ranks import counted, differ, of_lowest_rank
from ddp_check.rules.base import not_applicable, passed, unseen, unsure, worst, wrong

ENOUGH_SAMPLES = 8  # fewer samples than this may be the same by chance


def ranks_share_data(run):
    """the ranks share out the data"""
    steps = run.all(events.Step)
    # The observer notes the inputs of models in DDP and FSDP, so this is tensor parallelism:
    is_tensor_parallel = run.is_sharded and not any(step.inputs for step in steps)
    if is_tensor_parallel or any(step.mesh_dimensions > 1 for step in steps):
        return not_applicable("ranks that share a model have to have the same batches")
    if run.world_size < 2:
        return unseen("there is one rank only")
    epochs = run.training_passes
    if not epochs:
        return same_inputs(run)
    verdicts = [own_data_sets(epochs[0])]
    verdicts += [shared_in(run, number, epoch) for number, epoch in enumerate(epochs, 1)]
    return worst(verdicts)


def same_inputs(run):
    """Return the verdict on a run without a DataLoader, based on the inputs of the models."""
    rows = [row for row in run.step_rows if all(step.inputs for step in row)]
    # With equal inputs but other losses, each rank takes its part of the batch inside the model.
    same = [
        (step.inputs, step.losses) == (row[0].inputs, row[0].losses) for row in rows for step in row
    ]
    if not same or not all(same):
        return unseen("no DataLoader gives the samples")
    text = "in each step, all ranks train on the same batch: give each rank a part of its rows"
    return wrong(text, rows[0][0].where)


def own_data_sets(epoch):
    """Return the verdict if each rank has a data set of its own, or None."""
    first = of_lowest_rank(epoch)
    if not differ(epoch, "dataset_checksum"):
        return None
    text = "each rank has a data set of its own"
    if first.distributed:
        text += ", which the sampler divides again, so the same index means different samples"
        return unsure(text, first.where, "split_differs_by_rank")
    return unseen(text, first.where)


def shared_in(run, number, epoch):
    """Return the verdict on samples that more than one rank has in an epoch, or None."""
    first, own_data = of_lowest_rank(epoch), differ(epoch, "dataset_checksum")
    keys = [each.values("checksums") if own_data else keys_of(each) for each in epoch.values()]
    if None in keys:
        return unseen("the samples cannot be compared", first.where)
    loaded, distinct = sum(map(len, keys)), [{*of_rank} for of_rank in keys]
    shared = sum(map(len, distinct)) - len(set.union(*distinct))
    samples_per_rank = loaded / len(keys)
    if shared < ENOUGH_SAMPLES or shared <= samples_per_rank / 4:  # may be padding or chance
        return None
    text = f"epoch {number}: {shared} of {loaded} samples are seen by several ranks"
    if differ(epoch, "subset_checksum"):
        text += ": the split differs from rank to rank"
        return wrong(text, first.where, "rank_seeds_split_data")
    if not all(of_rank == distinct[0] for of_rank in distinct):
        if any(len(once) < len(all_) for once, all_ in zip(distinct, keys)):  # a sample comes twice
            text = "the sampler draws with replacement, so ranks may share samples by chance"
            return unseen(text, first.where)
        return unsure(f"{text}: is that intended?", first.where, "no_sampler")
    text = f"epoch {number}: each rank trains on the same {len(distinct[0])} samples"
    checksums = [each.values("checksums") for each in epoch.values()]
    same_batches = checksums[0] is not None and all(each == checksums[0] for each in checksums)
    if same_batches and any(step.inputs != row[0].inputs for row in run.step_rows for step in row):
        return unsure(f"{text}: does each take its part of each batch?", first.where, "no_sampler")
    return wrong(text, first.where, "no_sampler")


def keys_of(data_pass):
    """Return what identifies each sample, even if it is augmented; in a stream, its checksum.

    It is the index and the label, because an index may be another sample on another rank, or later.
    """
    if data_pass.iterable:
        return data_pass.values("checksums")
    indices, labels = data_pass.values("indices"), data_pass.values("label_checksums")
    return indices and [*zip(indices, labels or indices)]


def order_changes(run):
    """the order changes from epoch to epoch"""
    loops = {}  # (line of the loop, number of the trial, data) -> the passes of the lowest rank
    passes = [*map(of_lowest_rank, run.training_passes)]
    datasets = [data_pass.dataset for data_pass in passes]
    wraps = run.of_lowest_rank(events.Wrap)  # a script that wraps a new model begins another trial
    for data_pass in passes:
        trial = sum(wrap.time < data_pass.time for wrap in wraps)
        # Data that changes in each epoch is never read again. Then its Subset identifies the loop.
        is_again = datasets.count(data_pass.dataset) > 1
        key = data_pass.dataset if is_again else data_pass.subset_checksum
        loops.setdefault((data_pass.where, trial, key), []).append(data_pass)
    longest = max(loops.values(), key=len, default=[])
    if len(longest) < 2:
        return read_once(longest) or unseen("fewer than two epochs with a DataLoader: run more")
    verdict = worst(same_order(run, passes) for passes in loops.values() if len(passes) > 1)
    return verdict or passed(f"{len(longest)} epochs", longest[0].where)


def read_once(passes):
    """Return the verdict on a loop that keeps and repeats batches, as itertools.cycle does."""
    for data_pass in passes:
        inputs, count = [step.inputs for step in data_pass.steps], len(data_pass.batches)
        goes_on = data_pass.ended and len(inputs) > count > 1  # more steps than batches
        may_change = data_pass.shuffle is not False  # if it is False, the script wants one order
        # Each step has the same batch as the step `count` steps before it.
        if may_change and goes_on and all(inputs) and inputs[count:] == inputs[:-count]:
            text = f"steps 1 to {count} are repeated in the same order: the loader is read once"
            return wrong(text, data_pass.where, "no_set_epoch")


def same_order(run, passes):
    """Return the verdict on the passes of one loop, if two in a row have the same order."""
    first, where = passes[0], passes[0].where
    orders = [keys_of(each) for each in passes]
    if None in orders or len(orders[0]) < ENOUGH_SAMPLES:
        return unseen("the samples have no index, or there are too few", where)
    same = [number for number, (old, new) in enumerate(pairwise(orders), 1) if old == new]
    if not same:
        return None
    before, after = passes[same[0] - 1 : same[0] + 1]
    text = f"epochs {same[0]} and {same[0] + 1} have the same order"
    if not before.is_whole:
        text += f", each left after {counted(len(before.steps), 'step')}"
    if first.iterable:
        if first.persistent and len({each.dataset_checksum for each in passes}) > 1:
            text += ": the persistent workers do not see what changes in the data set"
            return wrong(text, where, "persistent_workers")
        return unsure(f"{text}: is that intended?", where)
    # If a data set caches what it loads, its checksum changes, but its samples do not.
    if before.dataset != after.dataset and before.values("checksums") != after.values("checksums"):
        return unsure(f"{text}, of data that has changed: is it all new?", where)
    if first.shuffle is None:
        return unsure(f"{text}: is that what the script's own sampler is to do?", where)
    if not first.shuffle:
        return unseen("the sampler does not shuffle: is that intended?", where)
    if not first.distributed:
        text += ": is the sampler seeded anew before each, or is its set_epoch never called?"
        return wrong(text, where, "no_set_epoch")
    if calls := run.of_lowest_rank(events.EpochSet):
        text += f"; set_epoch gets {calls[-1].value} last"
        return wrong(text, calls[0].where, "no_set_epoch")
    return wrong(f"{text}; set_epoch is never called", where, "no_set_epoch")


def random_numbers_differ(run):
    """ranks draw different random numbers in training"""
    if verdict := same_augmentation(run):
        return verdict
    sources = run.sources_drawn
    if run.world_size < 2 or not sources:
        return unseen("no random numbers are drawn between steps")
    rows, where = run.step_rows, run.steps[0].where
    same = [
        source
        for source in sources
        if all(step.rng.get(source) == row[0].rng[source] for row in rows for step in row)
    ]
    if not same:
        return passed("not the same from rank to rank", where)
    text = f"all ranks draw the same numbers ({', '.join(same)}): should they? If not, add 1000 * "
    return unsure(f"{text}rank to the seed", where, "same_augmentation")


def same_augmentation(run):
    """Return the verdict if samples are made with the same random numbers on all ranks."""
    states = {}  # (worker, source) -> {rank: checksum of the states around its first sample}
    for rank, passes in run.passes_by_rank.items():
        trained = {data_pass.pass_number for data_pass in passes if data_pass.is_training}
        for event in run.by_rank(events.Drawn)[rank]:
            if event.pass_number in trained:  # setdefault keeps the first event
                states.setdefault((event.worker, event.source), {}).setdefault(rank, event.state)
    on_all_ranks = {key: of for key, of in states.items() if len(of) == run.world_size > 1}
    same = [key for key, of_rank in on_all_ranks.items() if len({*of_rank.values()}) == 1]
    if not same:
        return None
    where = of_lowest_rank(run.training_passes[0]).where
    sources = sorted({source for _, source in same})
    text = f"all ranks have the same augmentation: equal seeds of {', '.join(sources)}; add 1000 * "
    text += "rank to each (in DataLoader workers, to that of torch.manual_seed; a worker_init_fn "
    text += "has to seed by torch.initial_seed())"
    # If another generator differs, this one may be equal on purpose, as for a common image size.
    verdict = wrong if len(same) == len(on_all_ranks) else unsure
    return verdict(text, where, "same_augmentation")
