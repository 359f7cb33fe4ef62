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
FLOATS = {"dtype": torch.float32, "device": "cpu"}  # whatever the script has set as its defaults
MATCHING = 8  # numbers in a row: two such rows are hardly ever equal by chance


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
    if owner == "script" and state.batch_is_unused:  # between loader and model
        for_whole_batch = are_within(DRAWS_PER_SAMPLE * since.sample_count, before, after)
        since.random_for_samples |= not for_whole_batch  # then each sample is augmented


def credit_script():
    """Note that the script itself has drawn, unless it has only prepared for its first step."""
    credit_draws("script" if state.steps else None)


def are_within(count, before, after):
    """Return whether at most so many numbers were drawn between two states of a generator.

    A state does not tell how many were drawn, so the first 8 numbers that follow the second one are
    sought, as 8 in a row, among those that follow the first.
    """
    generator = torch.Generator()
    generator.set_state(before)
    numbers = torch.rand(count + MATCHING, generator=generator, **FLOATS)
    generator.set_state(after)
    following = torch.rand(MATCHING, generator=generator, **FLOATS)
    windows = numbers.unfold(0, MATCHING, 1)  # each 8 in a row
    return bool((windows == following).all(dim=1).any())


@contextlib.contextmanager
def ignoring_draws():
    """Leave out what a DataLoader draws; it reports random samples by itself."""
    is_outermost = not state.in_loader  # a data set may read another loader
    if is_outermost:
        credit_script()
        # If another thread reads the loader, what the model draws meanwhile is ignored, too.
        state.in_loader = True
    try:
        yield
    finally:
        if is_outermost:
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
