"""Observes which samples a DataLoader returns."""

import contextlib
import operator
import pickle
import random
import sys
import zlib
from collections import deque
from types import SimpleNamespace

import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from ddp_check import events
from ddp_check.observer.base import TASK, first, say, seen, watch
from ddp_check.observer.group import watch_no_lengths
from ddp_check.observer.values import checksum, fingerprint, parts_of, sample_checksums


def contents(dataset):
    """Return the data set below all Subsets, and the indices that they keep, or None for all."""
    indices = None
    while isinstance(dataset, data.Subset):
        kept = dataset.indices if indices is None else [dataset.indices[one] for one in indices]
        dataset, indices = dataset.dataset, [*map(int, kept)]
    return dataset, indices


@watch(data.dataloader._BaseDataLoaderIter, "__init__", "_reset")
def begin(do, self, loader, first_iter=None):
    """Report the start of a pass over a DataLoader."""
    do(self, loader, *([] if first_iter is None else [first_iter]))
    if first_iter:  # persistent workers reuse the iterator of the previous epoch
        return
    seen.passes += 1
    seen.new_pass = True
    dataset, kept = contents(loader.dataset)
    # For the iterator: the number of the pass, the indices that Subsets keep, the samples that were
    # loaded for the next step before, and the indices of each batch that it asked for
    self._ddp_check = SimpleNamespace(
        number=seen.passes, kept=kept, samples=seen.samples, asked=deque()
    )
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # Accelerate wraps it
        batches = batches.batch_sampler
    sampler = loader.sampler if batches is None else batches
    sampler = batches.sampler if type(batches) is data.BatchSampler else sampler
    in_order = isinstance(sampler, data.SequentialSampler | range | list)
    length = total = None
    with contextlib.suppress(TypeError):  # an iterable data set may have none
        length = len(loader.dataset)
        total = len(loader)
    say(
        events.PassBegun,
        number=seen.passes,
        length=length,
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
    do(self, epoch)


@watch(data.DataLoader, "__init__")
def load_data(do, self, dataset, batch_size=1, *args, **kwargs):
    scalable = TASK.scale and batch_size and kwargs.get("batch_sampler") is None
    do(self, dataset, batch_size * TASK.scale if scalable else batch_size, *args, **kwargs)


@watch(data.dataloader._BaseDataLoaderIter, "_next_index")
def next_index(do, self):
    index = do(self)
    several = index if isinstance(index, list | tuple) else [index]
    self._ddp_check.asked.append(several)  # workers prefetch
    return index


@watch(data.dataloader._BaseDataLoaderIter, "__next__")
def next_batch(do, self):
    known = self._ddp_check
    watch_no_lengths()
    try:
        batch = do(self)
    except StopIteration:
        say(events.PassEnded, number=known.number)
        if seen.new_pass:  # no step: it was an evaluation
            seen.samples = known.samples
        raise
    indices = base = samples = labels = None
    with contextlib.suppress(TypeError):  # a sampler may give something else
        indices = [operator.index(index) for index in known.asked.popleft()]
        base = indices if known.kept is None else [known.kept[index] for index in indices]
    with contextlib.suppress(Exception):  # an exotic batch must not crash the user's script
        samples, labels = sample_checksums(batch)
    seen.samples += len(samples or ())
    seen.fresh = True
    found = {"indices": indices, "base": base, "samples": samples, "labels": labels}
    say(events.Batch, number=known.number, **found)
    return batch


def generators(dataset):
    """Return the global generators of random numbers, and those that a data set keeps."""
    numpy, left = sys.modules.get("numpy.random"), [dataset]
    found = {"torch": [torch.default_generator], "random": [random._inst], "generator": []}
    found["numpy"] = [numpy.mtrand._rand] if numpy else []
    with contextlib.suppress(Exception):  # an exotic data set must not crash the user's script
        for value in left:  # it grows
            made = isinstance(value, torch.Generator | random.Random)
            if made or hasattr(value, "bit_generator"):  # NumPy's
                found["generator"].append(value)
            elif len(left) < 1000:
                left += parts_of(value)
    return found


def state_of(generators):
    """Return a checksum of the states of these generators."""
    total = 0
    for one in generators:
        of_torch = isinstance(one, torch._C.Generator)
        total = zlib.crc32(one.get_state().numpy() if of_torch else pickle.dumps(one), total)
    return total


@watch(data._utils.fetch._MapDatasetFetcher, "fetch")
def fetch(do, self, indices):
    """Report the state from which each generator makes this process's first random sample."""
    if not hasattr(self, "_ddp_check"):
        self._ddp_check = generators(self.dataset)
    before = {name: state_of(found) for name, found in self._ddp_check.items()}
    batch = do(self, indices)
    worker = data.get_worker_info()
    for name, state in before.items():
        after = state_of(self._ddp_check[name])
        if after != state and first("drawn", name):
            say(events.Drawn, source=name, before=state, after=after, worker=worker and worker.id)
    return batch
