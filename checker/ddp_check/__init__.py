"""Checks a distributed training script by running it under observation on this machine's CPUs.

The command is `ddp-check train.py`; installing it also brings the pytest fixture `ddp_check`.
The manual is README.md in the folder above.
"""
