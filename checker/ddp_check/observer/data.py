"""Observes which samples a DataLoader returns."""

import operator
import pickle
import random
import sys
import zlib
from collections import deque
from dataclasses import dataclass, field

import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from ddp_check import events
from ddp_check.observer.base import TASK, ask, harmless, is_first, report, state
from ddp_check.observer.group import forget_lengths, pause_lengths, resume_lengths
from ddp_check.observer.patches import ITERATOR, patch
from ddp_check.observer.randomness import left_out
from ddp_check.observer.values import Samples, checksum, fingerprint, parts_of

OBJECTS = 1000  # of a data set that are searched for generators
WRAPPERS = 3  # around a batch sampler


@dataclass
class Progress:
    """What the observer keeps for each iterator of a DataLoader."""

    number: int  # of the pass
    kept: list | None  # indices that Subsets keep, or None for all
    samples: int  # loaded for the next step before this pass began
    asked: deque = field(default_factory=deque)  # indices of the batches that workers prefetch


def contents(dataset):
    """Return the data set below all Subsets, and the indices that they keep, or None for all."""
    kept = None
    while isinstance(dataset, data.Subset):
        indices = dataset.indices
        kept = indices if kept is None else [indices[index] for index in kept]
        dataset = dataset.dataset
    return dataset, kept if kept is None else [*map(int, kept)]


@patch(f"{ITERATOR}.__init__", f"{ITERATOR}._reset")
def begin(original, self, loader, first_iter=None):
    """Report the start of a pass over a DataLoader."""
    with left_out():  # it draws a seed for its workers
        original(self, loader, *([] if first_iter is None else [first_iter]))
    with harmless:
        if not first_iter:  # persistent workers reuse the iterator of the previous pass
            forget_lengths()
            report_pass(self, loader)


def report_pass(iterator, loader):
    state.passes += 1
    state.new_pass = True
    dataset, kept = ask(contents, loader.dataset, default=(loader.dataset, None))
    iterator._ddp_check = Progress(state.passes, kept, state.since_step.samples)
    sampler = sampler_of(loader)
    in_order = isinstance(sampler, data.SequentialSampler | range | list)
    length = ask(len, loader.dataset)  # an iterable data set may have none
    report(
        events.PassBegun,
        number=state.passes,
        length=length if isinstance(length, int) else None,
        total=ask(len, loader) if length is not None else None,
        iterable=isinstance(dataset, data.IterableDataset),
        part=0 if kept is None else zlib.crc32(repr(kept).encode()),
        distributed=isinstance(sampler, DistributedSampler),
        shuffle=not in_order and bool(ask(getattr, sampler, "shuffle", default=True)),
        drop_last=bool(loader.drop_last or ask(getattr, sampler, "drop_last", default=False)),
        tensors=checksum(ask(getattr, dataset, "tensors", default=())),
        data=fingerprint(dataset),
        persistent=loader.persistent_workers,
    )


def sampler_of(loader):
    """Return what decides about the order: a sampler, or a batch sampler of the script's own."""
    batches = loader.batch_sampler
    for _ in range(WRAPPERS):  # such as Accelerate's
        batches = ask(getattr, batches, "batch_sampler") or batches
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is data.BatchSampler else batches


@patch("torch.utils.data.distributed.DistributedSampler.set_epoch")
def set_epoch(original, self, epoch):
    report(events.EpochSet, value=epoch)
    original(self, epoch)


@patch("torch.utils.data.DataLoader.__init__")
def make_loader(original, self, dataset, batch_size=1, *args, **kwargs):
    """Multiply the batch for the drill world-size."""
    scalable = TASK.scale and batch_size and kwargs.get("batch_sampler") is None
    batch_size = batch_size * TASK.scale if scalable else batch_size
    original(self, dataset, batch_size, *args, **kwargs)


@patch(f"{ITERATOR}._next_index")
def next_index(original, self):
    """Remember the indices of a batch until it is returned."""
    index = original(self)
    with harmless:
        self._ddp_check.asked.append(index if isinstance(index, list | tuple) else [index])
    return index


@patch(f"{ITERATOR}.__next__")
def next_batch(original, self):
    pause_lengths()
    try:
        with left_out():  # a sampler draws the order; `fetch` reports random samples
            batch = original(self)
    except StopIteration:
        with harmless:
            end_pass(self._ddp_check)
        raise
    with harmless:
        report_batch(self._ddp_check, batch)
    return batch


def end_pass(progress):
    report(events.PassEnded, number=progress.number)
    if state.new_pass:  # no step: it was an evaluation
        state.since_step.samples = progress.samples
    resume_lengths()


def report_batch(progress, batch):
    asked = progress.asked.popleft() if progress.asked else None
    indices = ask(lambda: [operator.index(index) for index in asked])  # None: of another type
    base = indices
    if indices is not None and progress.kept is not None:
        base = ask(lambda: [progress.kept[index] for index in indices])
    samples = ask(Samples, batch)
    state.since_step.samples += len(samples.checksums or ()) if samples else 0
    state.new_batch = True
    report(
        events.Batch,
        number=progress.number,
        indices=indices,
        base=base,
        samples=samples and samples.checksums,
        labels=samples and samples.labels,
        width=samples and samples.width,
    )


# ---------------------------------------------------------------- random samples


def generators_of(dataset):
    """Return the global generators of random numbers, and those that a data set keeps."""
    numpy = sys.modules.get("numpy.random")
    global_generators = {
        "torch": [torch.default_generator],
        "random": [random._inst],
        "numpy": [numpy.mtrand._rand] if numpy else [],
    }
    return {**global_generators, "generator": [*filter(is_generator, objects_in(dataset))]}


def objects_in(dataset):
    """Return a data set, its parts, and theirs."""
    objects = [dataset]
    for value in objects:  # the list grows
        if len(objects) >= OBJECTS:
            break
        if not is_generator(value):
            objects += ask(parts_of, value, default=[])
    return objects


def is_generator(value):
    """Return whether a value is a generator of random numbers, of any library."""
    made = ask(isinstance, value, torch.Generator | random.Random)
    return made or ask(hasattr, value, "bit_generator")  # NumPy's


def state_of(generators):
    """Return a checksum of the states of these generators."""
    total = 0
    for generator in generators:
        of_torch = isinstance(generator, torch._C.Generator)
        content = generator.get_state().numpy() if of_torch else pickle.dumps(generator)
        total = zlib.crc32(content, total)
    return total


def states_of(generators):
    return {source: ask(state_of, group, default=0) for source, group in generators.items()}


@patch("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch")
def fetch(original, self, indices):
    """Report the state from which each generator makes this process's first random sample."""
    before = {}
    with harmless:
        if not hasattr(self, "_ddp_check"):
            self._ddp_check = generators_of(self.dataset)
        before = states_of(self._ddp_check)
    batch = original(self, indices)
    with harmless:
        worker = data.get_worker_info()
        after = states_of(self._ddp_check) if before else {}
        for source, new in after.items():
            old = before[source]
            if new != old and is_first("drawn", source):
                number = worker and worker.id
                report(events.Drawn, source=source, before=old, after=new, worker=number)
    return batch
