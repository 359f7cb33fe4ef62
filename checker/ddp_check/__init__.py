"""Checks a distributed PyTorch training script by running it under observation."""

__version__ = "2.1"
