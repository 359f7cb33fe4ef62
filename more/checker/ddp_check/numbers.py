"""How numbers are compared. A number that is not finite equals no number, not even itself."""

import math

import torch

SMALLEST = 1e-300  # replaces a zero in a denominator


def close(value, expected, relative=1e-6):
    """Return whether two numbers agree; False if one of them is not finite."""
    if not (math.isfinite(value) and math.isfinite(expected)):
        return False
    return abs(value - expected) <= relative * abs(expected)


def ratio(value, expected):
    """Return value / expected; NaN if either is not finite, or expected is nearly zero."""
    if not (math.isfinite(value) and math.isfinite(expected)) or abs(expected) < SMALLEST:
        return math.nan
    return value / expected


def distance(tensor, other):
    """Return the largest difference of two tensors, relative to their largest value.

    The result is infinite if one of them has a number that is not finite.
    """
    both = torch.stack([tensor.to_dense().double(), other.to_dense().double()])
    if not both.isfinite().all():
        return math.inf
    if not both.numel():
        return 0.0
    return ((both[0] - both[1]).abs().max() / both.abs().max().clamp(min=SMALLEST)).item()
