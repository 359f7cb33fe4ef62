"""Rules about the samples that the ranks train on."""

import math
import re
from itertools import pairwise

from ddp_check import events
from ddp_check.ranks import counted, differ, of_lowest_rank
from ddp_check.rules.base import (
    not_applicable,
    passed,
    unseen,
    unsure,
    worst,
    wrong,
)

SEEDS_GPU_BY_RANK = r"cuda\.manual_seed(_all)?\([^)\n]*rank"
ENOUGH_SAMPLES = 8  # fewer may be equal, or in the same order, by chance


def ranks_share_data(run):
    """the ranks share out the data"""
    if any(step.mesh_dimensions > 1 for step in run.all(events.Step)):
        return not_applicable("ranks that share a model have to have the same batches")
    epochs = run.training_passes if run.world_size > 1 else []
    verdicts = [*map(sets_differ, epochs[:1]), *map(shared_in, epochs)]
    rows = [row for row in run.step_rows if run.world_size > 1 and any(step.inputs for step in row)]
    if not verdicts and rows and all(step.inputs == row[0].inputs for row in rows for step in row):
        same = all(step.losses == row[0].losses for row in rows for step in row)
        text = "in each step, all ranks train on the same batch"
        verdicts = [(wrong if same else unsure)(text, rows[0][0].where, "no_sampler")]
    return worst(verdicts) or (None if epochs or verdicts else unseen("no sample is known"))


def sets_differ(epoch):
    """Return the verdict if each rank has a data set of its own, or None."""
    first = of_lowest_rank(epoch)
    if differ(epoch, "dataset_checksum"):
        text = "each rank has a data set of its own"
        if first.distributed:
            text = f"{text}, which the sampler divides again: do indices mean the same samples?"
            return unsure(text, first.where, "split_differs_by_rank")
        return unseen(text)


def shared_in(epoch):
    """Return the verdict on the samples that several ranks have in an epoch, or None."""
    first, keys = of_lowest_rank(epoch), [keys_of(each) for each in epoch.values()]
    if None in keys:
        return unseen("the samples cannot be compared", first.where)
    loaded, distinct = sum(map(len, keys)), [{*of_rank} for of_rank in keys]
    shared = sum(map(len, distinct)) - len(set.union(*distinct))
    if shared < ENOUGH_SAMPLES or shared <= loaded / len(keys) / 4:  # padding, or chance
        return None
    text = f"{shared} of {counted(loaded, 'sample')} are seen by several ranks"
    surely = all(of_rank == distinct[0] for of_rank in distinct) or differ(epoch, "subset_checksum")
    return (wrong if surely else unsure)(text, first.where, "no_sampler")


def keys_of(data_pass):
    """Return what tells samples apart: index and label, which augmentation keeps, or values."""
    if data_pass.iterable:
        return data_pass.values("checksums")
    indices, labels = data_pass.values("base_indices"), data_pass.values("label_checksums")
    return indices and [*zip(indices, labels or indices)]


def order_changes(run):
    """the order changes from epoch to epoch"""
    loops = {}  # line of the loop, and what it reads -> the passes of the lowest rank
    # Trials have a model each; but if anything that was saved is loaded, a new one may go on.
    saved = min((save.time for save in run.all(events.Save)), default=math.inf)
    goes_on = any(load.time > saved for load in run.all(events.StateLoaded))
    wraps = [] if goes_on else run.of_lowest_rank(events.Wrap)
    for data_pass in map(of_lowest_rank, run.training_passes):
        data = data_pass.subset_checksum, data_pass.tensor_checksum  # each fold has its own
        trial = sum(wrap.time < data_pass.time for wrap in wraps)
        loops.setdefault((data_pass.where, trial, *data), []).append(data_pass)
    longest = max(loops.values(), key=len, default=[])
    if len(longest) < 2:
        return read_once(longest) or unseen("fewer than two epochs with a DataLoader: run more")
    verdict = worst(same_order(run, passes) for passes in loops.values() if len(passes) > 1)
    return verdict or passed(f"{len(longest)} epochs", longest[0].where)


def read_once(passes):
    """Return the verdict on batches that are kept and repeated, as itertools.cycle does."""
    for data_pass in passes:
        inputs, count = [step.inputs for step in data_pass.steps], len(data_pass.batches)
        goes_on = data_pass.ended and len(inputs) > count > 1  # more steps than batches
        may_change = data_pass.shuffle is not False  # else one order for all epochs is meant
        # Each step has the batch of the step `count` steps before it.
        if may_change and goes_on and all(inputs) and inputs[count:] == inputs[:-count]:
            text = f"steps 1 to {count} are repeated in the same order: the loader is read once"
            return wrong(text, data_pass.where, "no_set_epoch")


def same_order(run, passes):
    """Return the verdict on passes of one loop, if two in a row have the same order."""
    first, where = passes[0], passes[0].where
    orders = [each.values("checksums" if first.iterable else "indices") for each in passes]
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
    # A data set that keeps what it has loaded is another one, and has the same samples.
    if before.dataset != after.dataset and before.values("checksums") != after.values("checksums"):
        return unsure(f"{text}, of data that has changed: is it all new?", where)
    if first.shuffle is None:
        return unsure(f"{text}: is that what the script's own sampler is to do?", where)
    if not first.shuffle:
        return unseen("the sampler does not shuffle: is that intended?", where)
    if not first.distributed:
        text += ": is the sampler seeded anew before each, or is its set_epoch never called?"
        return wrong(text, where, "no_set_epoch")
    calls = run.of_lowest_rank(events.EpochSet)
    if calls:
        text += f"; set_epoch gets {calls[-1].value} last"
        return wrong(text, calls[0].where, "no_set_epoch")
    return wrong(f"{text}; set_epoch is never called", where, "no_set_epoch")


def random_numbers_differ(run):
    """ranks draw different random numbers in training"""
    if verdict := same_augmentation(run):
        return verdict
    if run.world_size < 2 or not run.draws_numbers:
        return unseen("no random numbers are drawn between steps")
    if any(step.rng != row[0].rng for row in run.step_rows for step in row):
        return passed("not the same from rank to rank", run.steps[0].where)
    if run.translate and re.search(SEEDS_GPU_BY_RANK, run.source):
        return unseen("on GPUs, they come from another generator, which the script seeds by rank")
    text = "all ranks draw the same: should they? If not, add 1000 * rank to torch.manual_seed"
    return unsure(text, run.steps[0].where, "same_augmentation")


def generator_states(run):
    """Return the states of the generators of random samples: {(worker, source): [of each rank]}.

    Only of those that all ranks have used, and not in an evaluation.
    """
    trained = {  # rank -> the numbers of its passes
        rank: {data_pass.pass_number for data_pass in passes if data_pass.is_training}
        for rank, passes in run.passes_by_rank.items()
    }
    states_by_rank = [
        {
            (event.worker, event.source): (event.before, event.after)
            for event in reversed(drawn)  # the first counts
            if event.pass_number in trained[rank]
        }
        for rank, drawn in run.by_rank(events.Drawn).items()
    ]
    if len(states_by_rank) < 2:
        return {}
    common = set.intersection(*map(set, states_by_rank))
    return {key: [states[key] for states in states_by_rank] for key in common}


def same_augmentation(run):
    """Return the verdict if samples are made with the same random numbers on all ranks."""
    states = generator_states(run)
    same = [key for key, of_ranks in states.items() if len(set(of_ranks)) == 1]
    if not same or not run.training_passes:
        return None
    where = of_lowest_rank(run.training_passes[0]).where
    sources = sorted({source for _, source in same})
    text = f"all ranks have the same augmentation: equal seeds of {', '.join(sources)}; add 1000 * "
    text += "rank to each (in DataLoader workers, to that of torch.manual_seed; a worker_init_fn "
    text += "has to seed by torch.initial_seed())"
    # If other generators differ, equal ones may be meant, as for an image size of the whole batch.
    verdict = wrong if len(same) == len(states) else unsure
    return verdict(text, where, "same_augmentation")
