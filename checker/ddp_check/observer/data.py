"""Observes which samples a DataLoader returns."""

import contextlib
import operator
import random
import sys
import zlib
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    SequentialSampler,
    Subset,
    _utils,
    dataloader,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from ddp_check.events import Batch, Drawn, EpochSet, PassBegun, PassEnded
from ddp_check.observer.report import TASK, checksum, say, seen, watch, watch_no_lengths


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


ELEMENTS = 1 << 10  # of a sample that enter its checksum


@dataclass
class Asked:
    """What a DataLoader's iterator has requested so far."""

    number: int  # of the pass
    kept: list | None  # the indices that Subsets keep
    indices: list = field(default_factory=list)  # of each batch
    given: int = 0  # batches


def begin(loader, iterator):
    """Report the start of a pass over a DataLoader."""
    seen.passes += 1
    seen.new_pass = True
    dataset, kept = contents(loader.dataset)
    iterable = isinstance(dataset, dataloader.IterableDataset)
    iterator._ddp_check = Asked(seen.passes, kept)
    sampler = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    sized, total = hasattr(loader.dataset, "__len__"), None
    with contextlib.suppress(TypeError):  # an iterable data set may have no length
        total = len(loader)
    say(
        PassBegun(
            number=seen.passes,
            length=len(loader.dataset) if sized else None,
            total=total,
            iterable=iterable,
            part=0 if kept is None else zlib.crc32(repr(kept).encode()),
            distributed=isinstance(sampler, DistributedSampler),
            shuffle=not isinstance(sampler, SequentialSampler | range | list)
            and getattr(sampler, "shuffle", True),
            drop_last=loader.drop_last or getattr(sampler, "drop_last", False),
            tensors=checksum(getattr(dataset, "tensors", ())),
            data=fingerprint(dataset),
            persistent=loader.persistent_workers,
        )
    )


def sample_checksums(batch):
    """Return checksums of each sample in a batch, and of its smallest part, or None without one."""
    tensors = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.dim()]
    count = len(tensors[0]) if tensors else 0
    parts = sorted(
        (one.flatten(1) for one in tensors if len(one) == count and one.dim() > 1),
        key=lambda one: one.shape[1],
    )
    parts = [one.unsqueeze(1) for one in tensors if len(one) == count and one.dim() == 1] + parts
    rows, labels = [0] * count, None
    for part in parts:
        some = part.detach().cpu()[:, :: 1 + part.shape[1] // ELEMENTS].contiguous()
        bits = some.view(torch.uint8).numpy()
        rows = [zlib.crc32(row, total) for row, total in zip(bits, rows)]
        labels = labels or rows
    return rows or None, labels if len(parts) > 1 else None


@watch(DistributedSampler, "set_epoch")
def set_epoch(do, self, epoch):
    say(EpochSet(value=epoch))
    return do(self, epoch)


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
    watch_no_lengths()
    try:
        batch = do(self)
    except StopIteration:
        say(PassEnded(number=asked.number))
        raise
    indices = integers(asked.indices[asked.given])
    asked.given += 1
    base = indices if None in (indices, asked.kept) else [asked.kept[index] for index in indices]
    samples = labels = None
    with contextlib.suppress(Exception):  # an exotic batch must not crash the user's script
        samples, labels = sample_checksums(batch)
    seen.samples += len(samples or ())
    event = Batch(number=asked.number, indices=indices, base=base, samples=samples, labels=labels)
    say(event)
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
            at = worker and worker.id
            say(Drawn(source=name, before=before[name], after=now[name], worker=at))
    return batch
