"""The fixtures of a Slurm cluster."""

from support.slurm import clone, cluster, gated, submit  # noqa: F401
