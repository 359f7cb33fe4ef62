"""Notices who draws random numbers from PyTorch's generator.

Its state is compared before and after whatever may draw. A DataLoader draws a seed for itself, and
a sampler for its order: those say nothing about augmentation or dropout, and are left out.
"""

import contextlib

import torch

from ddp_check.observer.base import state
from ddp_check.observer.patches import patch
from ddp_check.observer.values import checksum

DRAWS_PER_SAMPLE = 2  # or more, if samples are augmented: a choice for a whole batch takes fewer
WINDOW = 8  # numbers by which two states of a generator are compared


def credit_draws(owner):
    """Note that "model" or "script" has drawn what was drawn since the last look at the generator.

    With None, nobody is credited with it: this look counts as the last one, and that is all.
    """
    if state.in_loader:  # `ignoring_draws` looks when it has made its batch
        return
    before, after = state.credited_up_to, torch.get_rng_state()
    state.credited_up_to = after  # from here on, this is the last look
    if owner is None or before is None or after.equal(before):
        return
    since = state.since_step
    since.random.setdefault(owner, checksum([before]))
    if owner == "script" and state.batch_is_unused:  # between loader and model: to augment?
        most = DRAWS_PER_SAMPLE * since.sample_count
        since.random_for_samples |= not are_within(most, before, after)


def credit_script():
    """Note that the script itself has drawn, unless it has only prepared for its first step."""
    credit_draws("script" if state.steps else None)


def are_within(count, before, after):
    """Return whether at most so many numbers were drawn between two states of a generator.

    A state does not tell how many were drawn, so the numbers that follow the second one are sought
    among those that follow the first.
    """
    generator = torch.Generator()
    generator.set_state(before)
    numbers = torch.rand(count + WINDOW, generator=generator, device="cpu")
    generator.set_state(after)
    following = torch.rand(WINDOW, generator=generator, device="cpu")
    windows = numbers.unfold(0, WINDOW, 1)  # each 8 in a row
    return bool((windows == following).all(dim=1).any())


@contextlib.contextmanager
def ignoring_draws():
    """Leave out what a DataLoader draws; it reports random samples by itself."""
    if state.in_loader:  # of a loader inside of a loader
        yield
        return
    credit_script()
    # If another thread reads the loader, what the model draws meanwhile is left out, too.
    state.in_loader = True
    try:
        yield
    finally:
        state.in_loader = False
        credit_draws(None)


# Once dynamo is imported, torch.manual_seed is another function than torch.random's.
@patch("torch.manual_seed")
@patch("torch.random.manual_seed", "torch.random.seed", "torch.random.set_rng_state")
def set_generator(original, *args, **kwargs):
    """Give the generator a new state, which is no draw: nobody is credited with it."""
    credit_script()
    result = original(*args, **kwargs)
    credit_draws(None)
    return result
