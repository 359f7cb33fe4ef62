"""Runs a script that starts others, which are forked as well: forking.py SCRIPT ARGUMENTS.

Its commands with the interpreter or with `torchrun --standalone` become the server's.
"""

import runpy
import subprocess
import sys
from pathlib import Path

import server


class Forked(subprocess.Popen):
    def __init__(self, words, **options):
        super().__init__(forked([str(word) for word in words]), **options)


def forked(words):
    """Return what does the same as a command, by the server."""
    if words[0] == sys.executable:
        return server.command(*words[1:])
    if Path(words[0]).name != "torchrun":
        return words
    _, standalone, nprocs, *program = words
    assert standalone == "--standalone", words
    return server.command(*program, nprocs=int(nprocs.removeprefix("--nproc-per-node=")))


if __name__ == "__main__":
    subprocess.Popen = Forked
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
