"""Runs a script that starts others, and forks those, too: forking.py SCRIPT ARGUMENTS.

The server runs what the script starts with the interpreter or with `torchrun --standalone`.
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
    """Return an equivalent command that the server runs, where it can."""
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
