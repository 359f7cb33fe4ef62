"""The fixtures of a Slurm cluster, and of machines without Slurm."""

from clusters import clone, cluster, submit  # noqa: F401
from machines import holder, machines  # noqa: F401
