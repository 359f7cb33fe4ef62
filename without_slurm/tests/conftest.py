"""The fixtures of machines without Slurm."""

from machines import holder, machines  # noqa: F401
