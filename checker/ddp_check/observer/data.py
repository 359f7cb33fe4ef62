"""Observes which samples a DataLoader returns."""

import operator
import random
import sys
import zlib
from dataclasses import dataclass, field

import torch
from torch.utils.data import (
    BatchSampler,
    SequentialSampler,
    Subset,
    _utils,
    dataloader,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from ddp_check.observer.report import (
    TASK,
    batch_checksum,
    checksum,
    say,
    seen,
    watch,
    watch_no_slices,
    where,
)


def contents(dataset):
    """Return the data set below all Subsets, and the indices that they keep, or None for all."""
    indices = None
    while isinstance(dataset, Subset):
        kept = dataset.indices
        indices = [int(kept[index]) for index in (range(len(kept)) if indices is None else indices)]
        dataset = dataset.dataset
    return dataset, indices


def fingerprint(value, depth=5):
    """Return a checksum that is the same for equal data sets."""
    if isinstance(value, torch.Tensor):
        return checksum([value])
    if isinstance(value, str | bytes | int | float):
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "tobytes") and value.nbytes < 1e8:
        return zlib.crc32(value.tobytes())
    items = value if isinstance(value, list | tuple) else getattr(value, "__dict__", ())
    items = list((items if isinstance(items, list | tuple) else items.items()) if depth else ())
    return zlib.crc32(repr([fingerprint(item, depth - 1) for item in items[:30]]).encode())


@dataclass
class Asked:
    """What a DataLoader's iterator has requested so far."""

    number: int  # of the pass
    iterable: bool  # the data set has no indices
    kept: list | None  # the indices that Subsets keep
    indices: list = field(default_factory=list)  # of each batch
    given: int = 0  # batches


def begin(loader, iterator):
    """Report the start of a pass over a DataLoader."""
    seen.passes += 1
    seen.new_pass = True
    dataset, kept = contents(loader.dataset)
    iterable = isinstance(dataset, dataloader.IterableDataset)
    iterator._ddp_check = Asked(seen.passes, iterable, kept)
    sampler = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    say(
        "pass",
        number=seen.passes,
        length=len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        iterable=iterable,
        part=0 if kept is None else zlib.crc32(repr(kept).encode()),
        distributed=isinstance(sampler, DistributedSampler),
        shuffle=not isinstance(sampler, SequentialSampler) and getattr(sampler, "shuffle", True),
        drop_last=loader.drop_last or getattr(sampler, "drop_last", False),
        tensors=checksum(getattr(dataset, "tensors", ())),
        data=fingerprint(dataset),
        where=where(),
    )


Base = dataloader._BaseDataLoaderIter


@watch(dataloader.DataLoader, "__init__")
def load_data(do, self, dataset, batch_size=1, *args, **kwargs):
    scalable = TASK.scale and batch_size and kwargs.get("batch_sampler") is None
    do(self, dataset, batch_size * TASK.scale if scalable else batch_size, *args, **kwargs)


@watch(Base, "__init__")
def start(do, self, loader):
    do(self, loader)
    begin(loader, self)


@watch(Base, "_reset")
def restart(do, self, loader, first_iter=False):
    do(self, loader, first_iter)
    if not first_iter:  # persistent workers reuse the iterator of the previous epoch
        begin(loader, self)


@watch(Base, "_next_index")
def next_index(do, self):
    index = do(self)
    self._ddp_check.indices.append(index)  # workers prefetch
    return index


@watch(Base, "__next__")
def next_batch(do, self):
    asked = self._ddp_check
    watch_no_slices()
    try:
        batch = do(self)
    except StopIteration:
        say("end", number=asked.number)
        raise
    indices = integers(asked.indices[asked.given])
    asked.given += 1
    base = indices if None in (indices, asked.kept) else [asked.kept[index] for index in indices]
    content = batch_checksum(batch) if asked.iterable else None
    say("batch", number=asked.number, indices=indices, base=base, content=content)
    return batch


def integers(indices):
    """Return the index or indices of a batch as a list of integers, or None if it has others."""
    try:
        return [
            operator.index(i) for i in (indices if isinstance(indices, list | tuple) else [indices])
        ]
    except TypeError:
        return None


def random_states():
    """Return checksums of the states of the random number generators: {name: checksum}."""
    states = {"torch": checksum([torch.get_rng_state()]), "random": hash(random.getstate()[1])}
    if "numpy.random" in sys.modules:
        _, keys, position, *_ = sys.modules["numpy.random"].get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), position)
    return states


drawing = set()  # the generators that this process has drawn from to make samples


@watch(_utils.fetch._MapDatasetFetcher, "fetch")
def fetch(do, self, indices):
    """Report the state from which each generator makes this process's first random sample."""
    before = random_states()
    batch = do(self, indices)
    now, worker = random_states(), get_worker_info()
    for name in before.keys() - drawing:
        if now[name] != before[name]:
            drawing.add(name)
            say("drawn", source=name, state=before[name], worker=worker and worker.id)
    return batch
