"""The five scripts (steps): commands that run them, edited copies, and imports as modules."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from support import gpus, server

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(ROOT.glob("0[1-9]_*.py"))
SCRIPT = {path.name[:2]: path for path in SCRIPTS}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
ON_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
NARROW = ("--width=4",)  # this model trains in a second, but learns little
FOUR_EPOCHS = ("4", *NARROW)  # enough to kill a rank, or to stop the run, in the middle
SMALL = ("--batch-size=64", "--width=4")  # 102 steps per epoch, for tests in other folders
LONG = ("4", *SMALL)

# ---------------------------------------------------------------- commands


def command(step, *args, nprocs=2, torchrun=()):
    """Return the command that runs a step, or a copy of one, with `nprocs` processes."""
    path = SCRIPT.get(step, step)
    if path.name.startswith("01"):
        return [sys.executable, path, *args]
    if path.name.startswith("02"):
        return [sys.executable, path, f"--nprocs={nprocs}", *args]
    launch = [TORCHRUN, "--standalone", f"--nproc-per-node={nprocs}", *torchrun]
    return [*launch, *(["--no-python", gpus.SHARE] if gpus.shared(nprocs) else []), path, *args]


def forked(step, *args, nprocs=2, restarts=0):
    """Return a command that does the same as `command` in a third of the time, without a launcher.

    Step 2 would start its own processes, so pass a copy that `without_spawn` has written.
    """
    path = SCRIPT.get(step, step)
    assert not path.name.startswith("02"), "use without_spawn"
    nprocs = 0 if path.name.startswith("01") else nprocs
    return server.command(path, *args, nprocs=nprocs, restarts=restarts)


# ---------------------------------------------------------------- copies


def edited(tmp_path, step, *changes):
    """Write a copy of a step with changes, as `write` does; return the path."""
    return write(tmp_path / SCRIPT[step].name, SCRIPT[step].read_text(encoding="utf-8"), changes)


def without_spawn(tmp_path, *changes):
    """Write a copy of step 2 that calls `main` once per rank, for ranks started from outside."""
    path = edited(tmp_path, "02", *changes, *WITHOUT_SPAWN)
    return path.rename(tmp_path / "without_spawn.py")


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


# ---------------------------------------------------------------- pieces of edited copies

DOUBLE = [  # in float32, AdamW can turn a rounding error into a full step
    ("dtype=torch.float32", "dtype=torch.float64"),
    (
        "    torch.manual_seed(args",
        "    torch.set_default_dtype(torch.float64)\n    torch.manual_seed(args",
    ),
]
WITHOUT_SPAWN = [
    (
        "    mp.spawn(main, args=(get_free_port(), args), nprocs=args.nprocs)\n",
        '    args.nprocs = int(os.environ["WORLD_SIZE"])\n'
        '    main(int(os.environ["RANK"]), os.environ["MASTER_PORT"], args)\n',
    ),
]


def exact(nprocs):
    """Return the changes with which a resumed run of this many ranks is bit-for-bit identical.

    Two ranks need no changes; more ranks need the lines of recipes/bitwise_resume.md.
    """
    recipe = (ROOT / "recipes" / "bitwise_resume.md").read_text(encoding="utf-8")
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


class Pickled:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


# ---------------------------------------------------------------- scripts as modules


def load(step):
    """Import a step as a module."""
    spec = importlib.util.spec_from_file_location(f"step{step}", SCRIPT[step])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(path, **changes):
    """Return the arguments of a tiny run, as parse_args would."""
    values = {"total_epochs": 1, "save_every": 1, "batch_size": 64, "lr": 4e-3, "width": 1}
    values |= {"seed": 0, "num_workers": 0, "checkpoint_path": str(path)}
    return SimpleNamespace(**values | changes)


def build_trainer(module, args):
    """Build a step's Trainer on the CPU, as its main does, with a few of the digits."""
    import torch

    torch.manual_seed(args.seed)
    digits = torch.utils.data.Subset(module.load_datasets()[0], range(256))
    model = module.build_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = module.prepare_dataloader(digits, args)
    return module.Trainer(model, data, optimizer, torch.device("cpu"), args)
