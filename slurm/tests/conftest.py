"""The fixtures of a Slurm cluster, and of machines without Slurm."""

from clusters import alone, clone, cluster, newer, simple, submit  # noqa: F401
from machines import holder, machines  # noqa: F401
