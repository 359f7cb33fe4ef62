"""Checks a distributed PyTorch training script by running it under observation."""

import sys

__version__ = "3.0"
if sys.platform != "linux":
    raise ImportError("ddp-check needs Linux, whose signals and /proc it uses: run it there")
