"""Checks a distributed training script by running it under observation on this machine's CPUs.

The command is `python -m ddp_check train.py`; `pytest -p ddp_check.plugin` provides the fixture.
The manual is README.md in this folder.
"""
