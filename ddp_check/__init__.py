"""Checks a distributed training script: runs it on the CPUs of this machine, watched from inside.

`python -m ddp_check train.py` is the command, `pytest -p ddp_check.plugin` the fixture. README.md
in this folder is the manual.
"""
