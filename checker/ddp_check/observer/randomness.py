"""Notices who draws random numbers from PyTorch's generator.

Its state is compared before and after whatever may draw. A DataLoader draws a seed for itself, and
a sampler for its order: those say nothing about augmentation or dropout, and are left out.
"""

import contextlib

import torch

from ddp_check.observer.base import state
from ddp_check.observer.patches import patch
from ddp_check.observer.values import checksum

SEVERAL = 2  # numbers for each sample: a choice for a whole batch takes fewer
WINDOW = 8  # numbers by which two states of a generator are compared


def attribute_draws(owner=None):
    """Note that this owner has drawn what was drawn since the last call; None: nobody's matter."""
    if state.in_loader:
        return
    current = torch.get_rng_state()
    known = state.generator
    if owner and known is not None and not current.equal(known):
        since = state.since_step
        since.draws.setdefault(owner, checksum([known]))
        if owner == "script" and state.unused_batch:
            most = SEVERAL * since.sample_count
            since.draws_for_samples |= not are_within(most, known, current)
    state.generator = current


def are_within(count, before, after):
    """Return whether at most so many numbers were drawn between two states of a generator."""
    generator = torch.Generator()
    generator.set_state(before)
    numbers = torch.rand(count + WINDOW, generator=generator)
    generator.set_state(after)
    following = torch.rand(WINDOW, generator=generator)
    return bool((numbers.unfold(0, WINDOW, 1) == following).all(dim=1).any())


def attribute_to_script():
    """Note that the script itself has drawn, unless it has only prepared for its first step."""
    attribute_draws("script" if state.steps else None)


@contextlib.contextmanager
def ignoring_draws():
    """Leave out what a DataLoader draws; it reports random samples by itself."""
    outermost = not state.in_loader
    if outermost:
        attribute_to_script()
    state.in_loader = True
    try:
        yield
    finally:
        if outermost:
            state.in_loader = False
            attribute_draws()


@patch("torch.manual_seed")
@patch("torch.random.manual_seed", "torch.random.seed", "torch.random.set_rng_state")
def set_generator(original, *args, **kwargs):
    """Set the generator to another state, which is no draw."""
    attribute_to_script()
    result = original(*args, **kwargs)
    attribute_draws()
    return result
