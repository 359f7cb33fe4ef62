"""The fixtures of machines without Slurm."""

from clusters import cluster  # noqa: F401
from machines import machines  # noqa: F401
