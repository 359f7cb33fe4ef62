"""What the benchmarks share: the scripts as modules, the machine, medians and pictures."""

import contextlib
import os
import platform
import re
import signal
import statistics
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
GREY = "#7d7d7d"  # readable on white and on black
TRAIN = "    trainer.train(args.total_epochs, args.save_every)\n"


# ---------------------------------------------------------------- the scripts as modules


def load(step, changes=()):
    """Import a step's script with some of its text replaced."""
    (path,) = ROOT.glob(f"{step}_*.py")
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        if old not in text:
            raise SystemExit(f"{path.name} has no {old!r}")
        text = text.replace(old, new)
    module = ModuleType(path.stem)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def prepared(step, words, changes=(), part=1):
    """Run a step's main() up to the training, on every part-th sample.

    Return its module, its arguments, the trainer and the test set. The process group must exist.
    """
    script = load(step, [*changes, (TRAIN, f"    return trainer, test_set\n{TRAIN}")])
    load_datasets = script.load_datasets

    def smaller():
        train_set, test_set = load_datasets()
        train_set.tensors = tuple(tensor[::part] for tensor in train_set.tensors)
        return train_set, test_set

    script.load_datasets, script.ddp_setup = smaller, lambda *_: None
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sys, "argv", sys.argv)
        stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        sys.argv = [step, *words]
        args = script.parse_args()
        rank = (dist.get_rank(),) if step == "02" else ()
        trainer, test_set = script.main(*rank, args)
    return script, args, trainer, test_set


# ---------------------------------------------------------------- figures


def positive_int(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def machine():
    """Return what the figures depend on: date, hardware, versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "date": date.today().isoformat(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def middle(ratios):
    """Return the median of some ratios and their quartiles."""
    if len(ratios) == 1:
        return dict.fromkeys(("median", "low", "high"), ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def cell(ratio, form=".2f"):
    """Return what middle() returned as a cell of a table."""
    median, low, high = (format(ratio[name], form) for name in ("median", "low", "high"))
    return f"{median} ({low}–{high})"  # noqa: RUF001  # an en dash


def table(*rows):
    """Return rows as a Markdown table; the first is the heading."""
    heading, *rows = ([str(word) for word in row] for row in rows)
    lines = [" | ".join(row) for row in (heading, ["---"] * len(heading), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


@contextlib.contextmanager
def drawing(path, title, **options):
    """Give axes to draw on, and save them as an SVG picture for light and dark pages."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(names, GREY) | {"svg.fonttype": "none"}):
        figure, axes = plt.subplots(layout="constrained", **options)
        yield axes
        figure.savefig(path, transparent=True, metadata={"Date": None, "Title": title})
        plt.close(figure)
