"""Checks a distributed training script by running it under observation on this machine's CPUs."""
