"""Observes which samples a DataLoader returns."""

import contextlib
import operator
import pickle
import random
import sys
import zlib
from types import SimpleNamespace

import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from ddp_check import events
from ddp_check.observer.lengths import watch_no_lengths
from ddp_check.observer.report import TASK, say, seen, watch
from ddp_check.observer.values import checksum, fingerprint, parts_of, sample_checksums


def contents(dataset):
    """Return the data set below all Subsets, and the indices that they keep, or None for all."""
    indices = None
    while isinstance(dataset, data.Subset):
        kept = dataset.indices
        indices = [int(kept[index]) for index in (range(len(kept)) if indices is None else indices)]
        dataset = dataset.dataset
    return dataset, indices


def begin(loader, iterator):
    """Report the start of a pass over a DataLoader."""
    seen.passes += 1
    seen.new_pass = True
    dataset, kept = contents(loader.dataset)
    # For the iterator: the number of the pass, the indices that Subsets keep, the samples that were
    # loaded for the next step before, the indices of each batch that it asked for, batches it gave
    asked = {"number": seen.passes, "kept": kept, "samples": seen.samples}
    iterator._ddp_check = SimpleNamespace(**asked, indices=[], given=0)
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # Accelerate wraps it
        batches = batches.batch_sampler
    sampler = loader.sampler if batches is None else batches
    sampler = batches.sampler if type(batches) is data.BatchSampler else sampler
    in_order = isinstance(sampler, data.SequentialSampler | range | list)
    total = None
    with contextlib.suppress(TypeError):  # an iterable data set may have no length
        total = len(loader)
    say(
        events.PassBegun,
        number=seen.passes,
        length=len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        total=total,
        iterable=isinstance(dataset, data.IterableDataset),
        part=0 if kept is None else zlib.crc32(repr(kept).encode()),
        distributed=isinstance(sampler, DistributedSampler),
        shuffle=not in_order and getattr(sampler, "shuffle", True),
        drop_last=loader.drop_last or getattr(sampler, "drop_last", False),
        tensors=checksum(getattr(dataset, "tensors", ())),
        data=fingerprint(dataset),
        persistent=loader.persistent_workers,
    )


@watch(DistributedSampler, "set_epoch")
def set_epoch(do, self, epoch):
    say(events.EpochSet, value=epoch)
    return do(self, epoch)


@watch(data.DataLoader, "__init__")
def load_data(do, self, dataset, batch_size=1, *args, **kwargs):
    scalable = TASK.scale and batch_size and kwargs.get("batch_sampler") is None
    do(self, dataset, batch_size * TASK.scale if scalable else batch_size, *args, **kwargs)


@watch(data.dataloader._BaseDataLoaderIter, "__init__")
def start(do, self, loader):
    do(self, loader)
    begin(loader, self)


@watch(data.dataloader._BaseDataLoaderIter, "_reset")
def restart(do, self, loader, first_iter=False):
    do(self, loader, first_iter)
    if not first_iter:  # persistent workers reuse the iterator of the previous epoch
        begin(loader, self)


@watch(data.dataloader._BaseDataLoaderIter, "_next_index")
def next_index(do, self):
    index = do(self)
    self._ddp_check.indices.append(index)  # workers prefetch
    return index


@watch(data.dataloader._BaseDataLoaderIter, "__next__")
def next_batch(do, self):
    asked = self._ddp_check
    watch_no_lengths()
    try:
        batch = do(self)
    except StopIteration:
        say(events.PassEnded, number=asked.number)
        if seen.new_pass:  # no step: it was an evaluation
            seen.samples = asked.samples
        raise
    indices = integers(asked.indices[asked.given])
    asked.given += 1
    base = indices if None in (indices, asked.kept) else [asked.kept[index] for index in indices]
    samples = labels = None
    with contextlib.suppress(Exception):  # an exotic batch must not crash the user's script
        samples, labels = sample_checksums(batch)
    seen.samples += len(samples or ())
    seen.fresh = True
    known = {"samples": samples, "labels": labels}
    say(events.Batch, number=asked.number, indices=indices, base=base, **known)
    return batch


def integers(indices):
    """Return the index or indices of a batch as a list of integers, or None if it has others."""
    several = indices if isinstance(indices, list | tuple) else [indices]
    with contextlib.suppress(TypeError):
        return [operator.index(index) for index in several]
    return None


def generators(dataset):
    """Return the generators of random numbers that a data set keeps."""
    found, left = [], [dataset]
    with contextlib.suppress(Exception):  # an exotic data set must not crash the user's script
        for value in left:  # it grows
            made = isinstance(value, torch.Generator | random.Random)
            if made or hasattr(value, "bit_generator"):  # NumPy's
                found.append(value)
            elif len(left) < 1000:
                left += parts_of(value)
    return found


def random_states(own):
    """Return checksums of the states of the global generators and of the data set's own."""
    numpy = sys.modules.get("numpy.random")
    found = {"torch": [torch.default_generator], "random": [random._inst], "generator": own}
    found["numpy"] = [numpy.mtrand._rand] if numpy else []
    return {name: zlib.crc32(repr([*map(state_of, of)]).encode()) for name, of in found.items()}


def state_of(generator):
    if isinstance(generator, torch.Generator):
        return checksum([generator.get_state()])
    return zlib.crc32(pickle.dumps(generator))


drawing = set()  # the generators that this process has drawn from to make samples


@watch(data._utils.fetch._MapDatasetFetcher, "fetch")
def fetch(do, self, indices):
    """Report the state from which each generator makes this process's first random sample."""
    if not hasattr(self, "_ddp_check"):
        self._ddp_check = generators(self.dataset)
    before = random_states(self._ddp_check)
    batch = do(self, indices)
    now, worker = random_states(self._ddp_check), data.get_worker_info()
    for name in before.keys() - drawing:
        if now[name] != before[name]:
            drawing.add(name)
            at = worker and worker.id
            say(events.Drawn, source=name, before=before[name], after=now[name], worker=at)
    return batch
