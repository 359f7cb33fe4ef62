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
from ddp_check.observer.patches import patch
from ddp_check.observer.values import (
    UNKNOWN_SAMPLES,
    describe_samples,
    fingerprint,
    in_double_precision,
    parts_of,
)

ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
MAX_WATCHED = 10  # number of batches watched per pass and worker: NumPy's state takes 0.2 ms
MAX_WRAPPERS = 3  # maximum number of nested wrappers around a batch sampler, such as Accelerate's


@dataclass
class PassState:
    """What the observer knows about a pass. It is an attribute of the DataLoader's iterator."""

    pass_number: int
    subset: list | None  # indices that Subsets keep, or None for all
    sample_count_before: int  # value of `since_step.sample_count` when the pass began
    in_order: bool  # whether workers return batches in the order of the requests
    requested: deque = field(default_factory=deque)  # indices of batches not yet returned


@patch(f"{ITERATOR}.__init__", f"{ITERATOR}._reset")
def begin(original, self, loader, *first_iter):
    """Report a pass over a DataLoader. With persistent workers, one iterator makes all passes.

    __init__(loader)      a new iterator begins a pass; one with workers then requests batches
    _reset(loader, True)  that iterator's __init__ calls this, so it is the same pass
    _reset(loader)        persistent workers begin another pass
    """
    original(self, loader, *first_iter)
    if not any(first_iter):
        with harmless():
            begin_pass(self, loader)


def begin_pass(iterator, loader):
    """Report a pass, with what is known about its data set and its sampler."""
    state.passes += 1
    state.no_step_in_pass = True
    dataset, subset = ask(without_subsets, loader.dataset, default=(loader.dataset, None))
    count_before = state.since_step.sample_count
    iterator._ddp_check = PassState(state.passes, subset, count_before, loader.in_order)
    sampler = sampler_of(loader)
    distributed = isinstance(sampler, DistributedSampler)
    iterable = isinstance(dataset, data.IterableDataset)
    length = ask(len, loader.dataset)  # an iterable data set may have none
    # Once PyTorch has been asked for the length of a stream, it warns about each further sample.
    batch_count = None if iterable or length is None else ask(len, loader)
    report(
        events.PassBegun,
        pass_number=state.passes,
        sample_count=length if isinstance(length, int) else None,
        batch_count=batch_count,
        iterable=iterable,
        subset_checksum=0 if subset is None else zlib.crc32(repr(subset).encode()),
        distributed=distributed,
        shuffle=shuffles(sampler),
        dataset_checksum=ask(fingerprint, dataset, default=0),
        persistent=loader.persistent_workers,
    )


def without_subsets(dataset):
    """Return the data set inside all nested Subsets, and the indices that they keep, or None."""
    subset = None
    while isinstance(dataset, data.Subset):
        indices = dataset.indices
        subset = indices if subset is None else [indices[index] for index in subset]
        dataset = dataset.dataset
    return dataset, subset if subset is None else [*map(int, subset)]


def sampler_of(loader):
    """Return the object that decides the order of the samples.

    It is a sampler, a list or range in its place, or a batch sampler that the script defines.
    """
    batch_sampler = loader.batch_sampler
    for _ in range(MAX_WRAPPERS):  # bounded, because an object may have any attribute
        batch_sampler = ask(getattr, batch_sampler, "batch_sampler") or batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is data.BatchSampler else batch_sampler


def shuffles(sampler):
    """Return whether a sampler is meant to change the order in each pass; None if not known."""
    if isinstance(sampler, data.SequentialSampler | range | list):
        return False
    if type(sampler).__module__.startswith("torch.utils.data"):
        return bool(getattr(sampler, "shuffle", True))  # RandomSampler has no such attribute
    says = ask(getattr, sampler, "shuffle")
    if isinstance(says, bool):
        return says
    # A sampler that has set_epoch() is meant to have a different order in each epoch.
    return True if ask(hasattr, sampler, "set_epoch") else None


@patch("torch.utils.data.distributed.DistributedSampler.set_epoch")
def set_epoch(original, self, epoch):
    """Report a call of set_epoch."""
    report(events.EpochSet, value=epoch)
    original(self, epoch)


@patch("torch.utils.data.DataLoader.__init__")
def make_loader(original, self, dataset, batch_size=1, *args, **kwargs):
    """Multiply the batch size for the drill world-size."""
    # With a batch sampler, which is nearly always passed by name, there is no batch size.
    if TASK.scale and batch_size and kwargs.get("batch_sampler") is None:
        batch_size *= TASK.scale
    original(self, dataset, batch_size, *args, **kwargs)


# ---------------------------------------------------------------- batches


@patch(f"{ITERATOR}._next_index")
def next_index(original, self):
    """Remember the indices of a batch until it is returned."""
    index = original(self)
    with harmless():
        self._ddp_check.requested.append(index if isinstance(index, list | tuple) else [index])
    return index


@patch(f"{ITERATOR}.__next__")
def next_batch(original, self):
    """Report a batch that is returned, or the end of the pass."""
    try:
        batch = original(self)
    except StopIteration:
        with harmless():
            end_pass(self._ddp_check)
        raise
    with harmless():
        report_batch(self._ddp_check, batch)
    return in_double_precision(batch) if TASK.scale else batch


def end_pass(pass_state):
    """Report that a pass is over."""
    report(events.PassEnded, pass_number=pass_state.pass_number)
    if state.no_step_in_pass:  # it was an evaluation, so no step uses its samples
        state.since_step.sample_count = pass_state.sample_count_before


def report_batch(pass_state, batch):
    """Report a batch, with what is known about its samples."""
    requested = pass_state.requested.popleft() if pass_state.requested else None
    indices = ask(lambda: [operator.index(index) for index in requested])  # None if not integers
    count = None if indices is None else len(indices)
    if pass_state.subset is not None:
        indices = ask(lambda: [pass_state.subset[index] for index in indices])
    samples = ask(describe_samples, batch, count, default=UNKNOWN_SAMPLES)
    state.since_step.sample_count += len(indices or samples["checksums"] or ())
    if not pass_state.in_order:  # the indices may be those of another batch
        indices, samples = None, UNKNOWN_SAMPLES
    state.batch_is_unevaluated = True
    report(events.Batch, pass_number=pass_state.pass_number, indices=indices, **samples)


# ---------------------------------------------------------------- random samples


def generators_of(dataset):
    """Return the global random number generators, and those that a data set holds."""
    numpy = sys.modules.get("numpy.random")
    below, _ = ask(without_subsets, dataset, default=(dataset, None))
    return {
        "torch": [torch.default_generator],
        "random": [random._inst],
        "numpy": [numpy.mtrand._rand] if numpy else [],
        "generator": [*filter(is_generator, parts_of(below))],
    }


def is_generator(value):
    """Return whether a value is a generator of PyTorch, of Python, or the newer one of NumPy."""
    if ask(isinstance, value, torch.Generator | random.Random):
        return True
    return ask(hasattr, value, "bit_generator")  # NumPy's


def states_by_source(generators):
    """Return {source of random numbers: checksum of its state}."""
    return {
        source: ask(checksum_of_states, of_source, default=0)
        for source, of_source in generators.items()
    }


def checksum_of_states(generators):
    """Return a checksum of the states of these generators."""
    return zlib.crc32(pickle.dumps([state_of(generator) for generator in generators]))


def state_of(generator):
    """Return the state of a generator of PyTorch, Python or NumPy; its pickle would hold more."""
    if isinstance(generator, torch._C.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)  # a RandomState of NumPy


@patch("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch")
def fetch(original, self, indices):
    """Report which generators make random samples, watching the first batches of a pass."""
    generators, before = {}, {}
    with harmless():
        self._ddp_check_batches = getattr(self, "_ddp_check_batches", 0) + 1
        if self._ddp_check_batches <= MAX_WATCHED:
            # The drill world-size wraps the data set: see SeededByIndex in level.py.
            generators = generators_of(getattr(self.dataset, "_ddp_check_inner", self.dataset))
        before = states_by_source(generators)
    batch = original(self, indices)
    with harmless():
        report_drawn(before, states_by_source(generators))
    return batch


def report_drawn(before, after):
    """Report each source whose state has changed, once per pass, or per persistent worker."""
    worker = data.get_worker_info()
    for source in before:
        if after[source] != before[source] and is_first("drawn", source, state.passes):
            report(
                events.Drawn,
                source=source,
                state=zlib.crc32(f"{before[source]} {after[source]}".encode()),
                pass_number=state.passes,
                worker=worker.id if worker else None,
            )
