"""The five scripts (steps): commands that run them, edited copies, and imports as modules."""

import os
import re
import sys
from importlib import import_module
from pathlib import Path

from support import gpus, server

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(ROOT.glob("0[1-9]_*.py"))
SCRIPT = {path.name[:2]: path for path in SCRIPTS}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
ON_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
NARROW = ("--width=4",)  # option for a model that trains in a second, but learns little
FOUR_EPOCHS = ("4", *NARROW)  # enough epochs to kill a rank, or to stop the run, in the middle
SMALL = ("--batch-size=64", "--width=4")  # 102 steps per epoch, for tests in other folders
LONG = ("4", *SMALL)


def command(step, *args, nprocs=2, torchrun=()):
    """Return the command that runs a step, or a copy of one, on `nprocs` ranks."""
    path = SCRIPT.get(step, step)
    if path.name.startswith("01"):
        return [sys.executable, path, *args]
    if path.name.startswith("02"):
        return [sys.executable, path, f"--nprocs={nprocs}", *args]
    launch = [TORCHRUN, "--standalone", f"--nproc-per-node={nprocs}", *torchrun]
    if gpus.shared(nprocs):  # start each rank on the first GPU
        launch += ["--no-python", ROOT / "more" / "without_slurm" / "share_gpu.sh"]
    return [*launch, path, *args]


def forked(step, *args, nprocs=2, restarts=0):
    """Return a command that does the same three times as fast, because it needs no launcher."""
    path = SCRIPT.get(step, step)
    if path.name.startswith("01"):
        nprocs = 0
    if path.name.startswith("02"):
        args = [f"--nprocs={nprocs}", *args]
    return server.command(path, *args, nprocs=nprocs, restarts=restarts)


def edited(tmp_path, step, *changes):
    """Write a copy of a step with changes, as `write` does; return the path."""
    return write(tmp_path / SCRIPT[step].name, SCRIPT[step].read_text(encoding="utf-8"), changes)


def write(path, text, changes=()):
    """Write a text with changes (old, new); each `old` must occur exactly once. Return the path."""
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path.name}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


def edit(path, old, new):
    """Replace a text that occurs exactly once in a file."""
    write(path, path.read_text(encoding="utf-8"), [(old, new)])


def load(step):
    """Import a step as a module."""
    return import_module(SCRIPT[step].stem)  # pytest searches the folder of conftest.py, too


# ---------------------------------------------------------------- changes for copies

SEED = "    torch.manual_seed(args"
DOUBLE = [  # changes to float64; in float32, AdamW can turn a rounding error into a full step
    ("dtype=torch.float32", "dtype=torch.float64"),
    (SEED, f"    torch.set_default_dtype(torch.float64)\n{SEED}"),
]


def exact(nprocs):
    """Return the changes with which a resumed run of this many ranks is bit-for-bit identical.

    Two ranks need no changes; more ranks need the lines of more/recipes/bitwise_resume.md.
    """
    recipe = (ROOT / "more" / "recipes" / "bitwise_resume.md").read_text(encoding="utf-8")
    added = "".join(re.findall(r"^\+(?!\+)(.*\n)", recipe, re.MULTILINE))
    following = "\n    def _run_batch("  # what follows DDP(model)
    return ((following, added + following),) if nprocs > 2 else ()


def on_each_rank(expression):
    """Return a line of code that prints the rank and the value of an expression.

    The line writes in one piece, because print may split a long line, and ranks then interleave.
    """
    line = f"'rank {{}}: {{}}\\n'.format(dist.get_rank(), ({expression}))"
    return f"print(end='', flush=True) or __import__('os').write(1, {line}.encode()) and None\n"


def digest(tensors):
    """Return an expression that computes a checksum of the bits of these tensors."""
    each = f"t.detach().cpu().numpy().tobytes() for t in {tensors}"
    return f"__import__('zlib').crc32(b''.join({each}))"
