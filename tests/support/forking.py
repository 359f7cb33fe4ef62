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
        super().__init__([str(word) for word in forked(*words)], **options)


def forked(program, *words):
    """Return a command that does the same as another, by the server."""
    if program == sys.executable:
        return server.command(*words)
    if Path(program).name != "torchrun":
        return [program, *words]
    standalone, nprocs, *script = words
    assert standalone == "--standalone", words
    return server.command(*script, nprocs=int(nprocs.removeprefix("--nproc-per-node=")))


if __name__ == "__main__":
    subprocess.Popen = Forked
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
