"""Notices who draws random numbers from PyTorch's generator.

Its state is compared before and after whatever may draw. A DataLoader draws a seed for itself, and
a sampler for its order: those say nothing about augmentation or dropout, and are left out.
"""

import contextlib

import torch

from ddp_check.observer.base import state
from ddp_check.observer.patches import patch
from ddp_check.observer.values import checksum


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
    state.since_step.random.setdefault(owner, checksum([before]))


def credit_script():
    """Note that the script itself has drawn, unless it has only prepared for its first step."""
    credit_draws("script" if state.steps else None)


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
