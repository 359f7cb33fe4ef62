"""Starts ranks as torchrun does, but sooner: launcher.py NPROC RESTARTS SCRIPT ARGUMENTS.

Imports take most of the time of a short run. Here they are done once, and the ranks are forked.
"""

import gc
import os
import runpy
import sys

import numpy as np
import sklearn.metrics  # noqa: F401
import torch._dynamo  # noqa: F401  # the first step of an optimizer imports it
from observer.srun import free_port


def start(nproc, port, script, args):
    """Fork the ranks, wait for all of them, and return whether all succeed."""
    children = []
    for rank in range(nproc):
        if child := os.fork():
            children.append(child)
            continue
        os.setsid()
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        np.random.seed()  # as in processes that import it themselves; Python's random does it, too
        sys.argv = [script, *args]
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        print(f"exit codes of the ranks: {codes}", file=sys.stderr, flush=True)
    return not any(codes)


def main(nproc, restarts, script, *args):
    gc.freeze()  # so that the ranks share the memory of what is imported
    return not any(start(int(nproc), free_port(), script, args) for _ in range(int(restarts) + 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
