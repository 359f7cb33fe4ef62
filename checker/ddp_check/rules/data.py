"""Rules about the samples that the ranks train on."""

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

from ddp_check import events
from ddp_check.ranks import counted, differ, of_lowest_rank
from ddp_check.rules.base import (
    PASS,
    UNSEEN,
    UNSURE,
    WRONG,
    not_applicable,
    passed,
    unseen,
    unsure,
    worst,
    wrong,
)

SEEDS_GPU_BY_RANK = r"cuda\.manual_seed(_all)?\([^)\n]*rank"
HASHES = r"(?<![\w.])hash\("
ENOUGH_SAMPLES = 8  # fewer may be equal, or in the same order, by chance
RANDOM_NUMBERS = {  # by who draws them
    "model": "random numbers in the model, such as dropout's",
    "script": "random numbers in the training loop",
}


def ranks_share_data(run):
    """the ranks share out the data"""
    rows = [row for row in run.step_rows if run.world_size > 1 and any(step.inputs for step in row)]
    on_a_mesh = any(step.mesh_dimensions > 1 for step in run.all(events.Step))
    if run.is_sharded and (on_a_mesh or not rows):
        return not_applicable("ranks that share a model have to have the same batches")
    by_samples = verdict_on_epochs(run.training_passes, bool(run.all(events.Drawn)))
    if by_samples is None or by_samples.status == PASS:  # each rank has samples of its own
        return divided_among_more(run) or other_samples(run) or by_samples
    if by_samples.status == WRONG and parts_of_batches(run, rows):
        text = f"{by_samples.text}: does each take its part of each batch?"
        return replace(by_samples, status=UNSURE, text=text)
    if by_samples.status != UNSEEN:
        return by_samples
    # The samples do not tell. The batches that entered the models may: those of the same step, or,
    # if no DataLoader was used, those of any step.
    same_batches = bool(rows) and all(step.inputs == row[0].inputs for row in rows for step in row)
    verdict = same_batches and verdict_on_same_batches(run, rows)
    if verdict or run.training_passes:  # whose samples were compared above
        return verdict or by_samples
    return same_stream(run) or (not same_batches and same_samples(run)) or by_samples


def parts_of_batches(run, rows):
    """Return whether the ranks load the same batches, and none has trained on what another has.

    False, too, if samples are augmented, by the data set or in the loop: then all inputs differ.
    """
    if any("script" in step.random for row in rows for step in row):
        return False
    for of_rank in run.training_passes:
        first, *others = (data_pass.values("checksums") for data_pass in of_rank.values())
        if first is None or any(other != first for other in others):
            return False
    inputs = [{*chain(*(step.inputs for step in column))} for column in zip(*rows)]
    return bool(inputs) and all(inputs) and not set.intersection(*inputs)


def verdict_on_same_batches(run, rows):
    """Return the verdict if the batches of each step are the same on all ranks."""
    text, where = "in each step, all ranks train on the same batch", rows[0][0].where
    if all(step.losses == row[0].losses for row in rows for step in row):
        return wrong(text, where, "no_sampler")
    if run.draws_numbers:
        return unsure(f"{text}: on other parts of it?", where, "no_sampler")


def verdict_on_epochs(epochs, samples_are_random):
    """Return the worst verdict on the epochs, or None if each rank has samples of its own."""
    if not epochs:
        return unseen("no DataLoader was used to train, so no sample has an index")
    verdicts = []
    for number, epoch in enumerate(epochs, 1):
        # Later on, they may differ by what each has loaded, and keeps.
        verdict = sets_differ(epoch) if number == 1 else None
        if verdict := verdict or verdict_on_epoch(epoch, samples_are_random):
            text, where = f"epoch {number}: {verdict.text}", of_lowest_rank(epoch).where
            verdicts.append(replace(verdict, text=text, where=where))
    # One epoch that passes does not make up for another that was not seen.
    not_passed = [verdict for verdict in verdicts if verdict.status != PASS]
    return worst(not_passed or verdicts)


def verdict_on_epoch(epoch, samples_are_random):
    """Return the verdict on the samples of an epoch, or None if each rank has its own."""
    if of_lowest_rank(epoch).iterable:
        return verdict_on_streams(epoch)
    samples = [data_pass.values("base_indices") for data_pass in epoch.values()]
    if None in samples:
        return unseen("the samples have no index")
    if any(map(repeats, samples)):
        return unseen("a rank draws samples with replacement")
    is_whole = all(data_pass.is_whole for data_pass in epoch.values())
    shared = repeats(chain(*samples))
    too_many = shared > padding_allowed(list(epoch.values()))
    # In a small data set, the padding may be as many as all samples: sharing all is a fault, too.
    if too_many or (is_whole and shared and are_the_same(samples)):
        return verdict_on_same_indices(epoch, samples, samples_are_random)
    if of_lowest_rank(epoch).distributed or (is_whole and shared):  # what is shared is padding
        return None
    if not shared and shared_by_chance(epoch, samples) >= ENOUGH_SAMPLES:
        return None
    # Few were read, or a few are shared, as padding would be, before the end that is padded.
    return unseen("the ranks read too few samples to tell")


def shared_by_chance(epoch, samples):
    """Return how many samples two ranks would share if each drew from all in an order of its own.

    Of 60,000 samples, two ranks that read 160 share 0.4 on average; infinite: the size is unknown.
    """
    size = of_lowest_rank(epoch).sample_count
    return len(samples[0]) * len(samples[-1]) / size if size else math.inf


def are_the_same(samples):
    """Return whether all ranks have the same samples, perhaps in other orders."""
    return all(set(of_rank) == set(samples[0]) for of_rank in samples)


def verdict_on_same_indices(epoch, samples, samples_are_random):
    """Return the verdict on an epoch in which several ranks ask for the same indices."""
    if dealt_by_data_set(epoch):
        if samples_are_random:  # these, or new views, crops and masks of the same ones
            return unsure("the ranks ask for the same indices: are the samples new for each rank?")
        return passed("the ranks ask for the same indices, and get other samples")
    if are_the_same(samples):
        text = f"each rank trains on the same {counted(len(samples[0]), 'sample')}"
        return wrong(text, "", "no_sampler")
    text = f"{repeats(chain(*samples))} samples are seen by several ranks"
    if differ(epoch, "subset_checksum"):
        return wrong(f"{text}: the split differs from rank to rank", "", "split_differs_by_rank")
    is_whole = all(data_pass.is_whole for data_pass in epoch.values())
    size = of_lowest_rank(epoch).sample_count or 0  # None: it is not known
    if is_whole and sum(map(len, samples)) >= size:
        return wrong(f"{text}: each has a part of an order of its own", "", "rank_seeds_split_data")
    return unsure(f"{text}: each draws from all of them in an order of its own", "", "no_sampler")


def verdict_on_streams(epoch):
    """Return the verdict if IterableDatasets give several ranks the same samples in an epoch.

    Samples have no index there, so they are compared by their values, of which some may be equal.
    """
    samples = [data_pass.values("checksums") for data_pass in epoch.values()]
    if None in samples:
        return unseen("the samples cannot be compared")
    if verdict := repeated_by_workers(samples):
        return verdict
    distinct = [set(of_rank) for of_rank in samples]
    shared = repeats(chain(*distinct))
    # If two ranks see the same samples, half of them are repeats; up to a quarter may be chance.
    if shared <= sum(map(len, samples)) / 4:
        return None
    if all(of_rank == distinct[0] for of_rank in distinct):
        text = f"each rank trains on the same {counted(len(distinct[0]), 'sample')}"
        in_one_order = all(of_rank == samples[0] for of_rank in samples)
        if in_one_order or not any(map(repeats, samples)):
            return wrong(text, "", "no_sampler")
        return unsure(f"{text}: does each draw with replacement?", "", "no_sampler")
    return unsure(f"{shared} samples are seen by several ranks", "", "no_sampler")


def repeated_by_workers(samples):
    """Return the verdict if each rank gets all its samples equally often, and more than once."""
    times = {count for of_rank in samples for count in Counter(of_rank).values()}
    if len(times) == 1 and min(times) > 1 and len(set(samples[0])) >= ENOUGH_SAMPLES:
        text = f"each rank trains {min(times)} times on each sample: does each worker yield all?"
        return unsure(text, "", "recipes/streaming")


def same_stream(run):
    """Return the verdict if the ranks train on the same batches, but not in the same steps.

    That happens with equal seeds if one rank draws more numbers, as for an evaluation.
    """
    steps_by_rank = run.by_rank(events.Step)
    inputs = [list(chain(*(step.inputs for step in steps))) for steps in steps_by_rank.values()]
    common, batches = set.intersection(*map(set, inputs)), len(inputs[0])
    # Inputs that repeat are constant, or few: it says nothing that they are equal.
    if len(inputs) > 1 and len(common) > batches / 2 and not any(map(repeats, inputs)):
        text = f"{len(common)} of {batches} batches are the same on all ranks, in other steps"
        return wrong(text, run.all(events.Step)[0].where, "no_sampler")


def same_samples(run):
    """Return the verdict if, without a DataLoader, the ranks train on the same samples.

    Each epoch may deal them anew, so those before the first that comes again count: of 0 2 4 2 0 4
    and 1 3 5 0 1 2, these are 0 2 4 and 1 3 5 0.
    """
    firsts = []  # of each rank, those samples
    for steps in run.by_rank(events.Step).values():
        firsts.append(set())
        for sample in chain(*(step.samples for step in steps)):
            if sample in firsts[-1]:
                break
            firsts[-1].add(sample)
    fewest, common = min(map(len, firsts)), set.intersection(*firsts)
    if run.world_size > 1 and fewest >= ENOUGH_SAMPLES and len(common) > fewest / 4:
        text = f"{len(common)} of the first {fewest} samples of each rank are those of others, too"
        text += ": does each rank shuffle by a seed of its own?"
        return unsure(text, run.all(events.Step)[0].where, "no_sampler")


def repeats(samples):
    """Return how many of these samples equal an earlier one."""
    samples = list(samples)
    return len(samples) - len(set(samples))


def padding_allowed(passes):
    """Return how many samples may come twice, so that all ranks have equally many.

    That is less than one for each rank, as DistributedSampler adds, or else less than a batch for
    each, as Accelerate fills the last batches.
    """
    of_each_rank = 1 if passes[0].distributed else max(passes[0].sizes, default=1)
    return len(passes) * of_each_rank - 1


def divided_among_more(run):
    """Return the verdict if DistributedSampler divides the samples among more ranks than exist."""
    for data_pass in map(of_lowest_rank, run.training_passes):
        if data_pass.replicas > run.world_size:
            text = f"DistributedSampler divides the samples among {data_pass.replicas} ranks"
            return wrong(f"{text}, and there are {run.world_size}", data_pass.where)


def other_samples(run):
    """Return the verdict if an index means one and the same sample on a rank, but not on all.

    Augmented samples, unlike these, differ from epoch to epoch, too.
    """
    where = run.all(events.Step)[0].where
    if calls_hash(run):
        text = "the script calls hash(), which returns other numbers in each process: for strings?"
        return unsure(text, where)
    checksums = {}  # (line of the loop, index) -> {rank: checksums of the sample}
    for epoch in run.training_passes:
        first = of_lowest_rank(epoch)
        if first.distributed and not first.iterable:
            for rank, sample_by_index in zip(epoch, checksums_by_index(epoch, "checksums")):
                for index, checksum in sample_by_index.items():
                    of_index = checksums.setdefault((first.where, index), {})
                    of_index.setdefault(rank, []).append(checksum)
    of_ranks = [values for by_rank in checksums.values() for values in by_rank.values()]
    came_again = sum(len(values) > 1 for values in of_ranks)
    augmented = any(len(set(values)) > 1 for values in of_ranks)
    if came_again < ENOUGH_SAMPLES or augmented:
        return None
    common = [[*chain(*by_rank.values())] for by_rank in checksums.values() if len(by_rank) > 1]
    differing = [values for values in common if len(set(values)) > 1]
    if len(differing) > len(common) / 2:
        text = f"{len(differing)} of {counted(len(common), 'sample')} that several ranks have seen"
        text += ", in different epochs, are not the same on each: is that intended?"
        return unsure(text, where, "split_differs_by_rank")


def calls_hash(run):
    """Return whether several processes call hash(), each perhaps with a seed of its own."""
    seeded = "PYTHONHASHSEED" in run.source
    return run.world_size > 1 and not seeded and bool(re.search(HASHES, run.source))


def sets_differ(epoch):
    """Return the verdict if each rank has a data set of its own."""
    distributed = of_lowest_rank(epoch).distributed
    if distributed and differ(epoch, "tensor_checksum"):
        text = "the data sets of the ranks differ: the same index means different samples"
        return wrong(text, "", "split_differs_by_rank")
    if not differ(epoch, "dataset_checksum"):
        return None
    if distributed:
        return unsure("each rank has a data set of its own, which DistributedSampler divides again")
    return unseen("each rank has a data set of its own: are they parts of a larger one?")


def dealt_by_data_set(epoch):
    """Return whether the data set gives each rank something else for the same index.

    Augmentation changes samples, and leaves their labels as they are. Where there are no labels, or
    all samples have the same one, the samples decide.
    """
    if not differ_where_common(checksums_by_index(epoch, "checksums")):
        return False
    labels = checksums_by_index(epoch, "label_checksums")
    labels_tell = len(set(labels[0].values())) > 1
    only_augmented = labels_tell and not differ_where_common(labels)
    return not only_augmented


def checksums_by_index(epoch, field_name):
    """Return {(index, number of elements): checksum} for each rank.

    A sample that is padded to another length has another checksum, so its length is in the key.
    """
    return [
        {
            (index, batch.width): checksum
            for batch in data_pass.batches
            for index, checksum in zip(batch.base_indices, getattr(batch, field_name) or ())
        }
        for data_pass in epoch.values()
    ]


def differ_where_common(dictionaries):
    """Return whether dictionaries differ under a key that all have."""
    common = set.intersection(*map(set, dictionaries))
    return any(each[key] != dictionaries[0][key] for each in dictionaries for key in common)


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
        return begins_again(passes, orders)
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


def begins_again(passes, orders):
    """Return the verdict on an epoch that is left early, and begun again by the next pass."""
    pairs = pairwise(zip(passes, orders))
    for number, ((left, order), (new, following)) in enumerate(pairs, 1):
        is_begun_again = len(order) >= ENOUGH_SAMPLES and following[: len(order)] == order
        if is_begun_again and new.shuffle and not left.is_whole:
            text = f"the {len(order)} samples of pass {number} come again in the next one, in the "
            text += "same order: should that go on behind them, as after a resume?"
            return unsure(text, new.where, "epoch_starts_again")


def random_numbers_differ(run):
    """ranks draw different random numbers in training"""
    if not run.all(events.PassBegun) and not any(step.random for step in run.all(events.Step)):
        return unseen("no DataLoader was used, and nothing random is drawn")
    if verdict := same_augmentation(run):
        return verdict
    if run.translate and re.search(SEEDS_GPU_BY_RANK, run.source):
        return unseen("on GPUs, they come from another generator, which the script seeds by rank")
    states = generator_states(run).values()
    different = ["augmentation"] if any(len(set(of_ranks)) > 1 for of_ranks in states) else []
    for source, what in RANDOM_NUMBERS.items():
        drawn = states_before(run, source)
        if any(len(set(of_ranks)) > 1 for of_ranks in drawn):
            different.append(what)
        elif drawn:
            return same_numbers(run, source, what)
    if not different:
        return unseen("no random numbers to compare, or only of a generator that is not known")
    text = f"not the same from rank to rank: {', '.join(different)}"
    return passed(text, run.all(events.Step)[0].where)


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


def states_before(run, source):
    """Return the states from which all ranks draw in a step: [of each rank] for each such step."""
    rows = run.step_rows if run.world_size > 1 else []
    states = [[step.random.get(source) for step in row] for row in rows]
    return [of_ranks for of_ranks in states if None not in of_ranks]


def same_numbers(run, source, what):
    """Return the verdict on what the model, or the loop, draws, if it is the same on all ranks."""
    rows = [row for row in run.step_rows if all(step.random for step in row)]
    text, where = f"all ranks draw the same {what}", rows[0][0].where
    for_samples = all(step.random_for_samples for row in rows for step in row)
    if source == "script" and for_samples and not run.is_sharded:
        text += ", several for each sample: add 1000 * rank to torch.manual_seed"
        return wrong(text, where, "same_augmentation")
    text += ": should they? If not, add 1000 * rank to torch.manual_seed"
    return unsure(text, where, "same_augmentation")
