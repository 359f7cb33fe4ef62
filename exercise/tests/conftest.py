"""The fixtures of a Slurm cluster."""

from clusters import clone, cluster, submit  # noqa: F401
