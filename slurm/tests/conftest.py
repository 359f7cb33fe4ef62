"""The fixtures of a Slurm cluster, and of its nodes without Slurm."""

from clusters import alone, clone, cluster, simple, submit  # noqa: F401
from machines import machines  # noqa: F401
