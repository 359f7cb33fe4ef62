"""The fixtures of a Slurm cluster, of the checker and of the generator."""

from checking import own_folder  # noqa: F401
from clusters import clone, cluster, submit  # noqa: F401
from generating import copy  # noqa: F401
