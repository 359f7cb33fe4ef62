"""What the benchmarks share: the scripts as modules, command lines, figures, tables, pictures."""

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
STEPS = {path.name[:2]: path for path in ROOT.glob("0[1-9]_*.py")}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
WRITTEN_BY = "benchmarks/all.py, or the script in benchmarks/ of this name"
BUSY = os.getloadavg()[0]  # what else runs here, when a benchmark starts
GREY = "#7d7d7d"  # readable on white and on black
TRAIN = "    trainer.train(args.total_epochs, args.save_every)\n"


# ---------------------------------------------------------------- the scripts as modules


def load(name, changes=()):
    """Import a step, like "04", or a recipe for step 5, with some of its text replaced."""
    if name in STEPS:
        text = STEPS[name].read_text(encoding="utf-8")
    else:
        words = ["patch", "--quiet", "--output=-", STEPS["05"], ROOT / "recipes" / f"{name}.md"]
        text = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    module = ModuleType(name)
    text = replaced(text, changes, name)
    exec(compile(text, STEPS.get(name, name), "exec"), module.__dict__)
    return module


def replaced(text, changes, name):
    """Return a text with changes [(old, new)], of which each `old` is there once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise SystemExit(f"{old!r} is {text.count(old)} times in {name}")
        text = text.replace(old, new)
    return text


def parsed(script, words):
    """Return the arguments that a script takes from a command line."""
    with mock.patch.object(sys, "argv", [script.__name__, *words]):
        return script.parse_args()


def prepared(step, words, changes=(), part=1):
    """Return a step's Trainer for every part-th sample, in the process group that there is."""
    script = load(step, [*changes, (TRAIN, f"    return trainer\n{TRAIN}")])
    load_datasets = script.load_datasets

    def smaller():
        train_set, test_set = load_datasets()
        train_set.tensors = tuple(tensor[::part] for tensor in train_set.tensors)
        return train_set, test_set

    script.load_datasets = smaller
    args = parsed(script, words)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return script.train_and_evaluate(device, args)


# ---------------------------------------------------------------- command lines


def launcher(ranks):
    """Return the words that start a script with this many ranks on this machine."""
    return [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}"]


def parser_of(docstring):
    """Return a parser that is described by the first line of a script's docstring."""
    style = argparse.ArgumentDefaultsHelpFormatter
    return argparse.ArgumentParser(description=docstring.splitlines()[0], formatter_class=style)


def needs_torchrun(parser):
    if "RANK" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc-per-node=2 {parser.prog}")


def positive_int(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def positive(text):
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def powers_up_to(limit):
    """Return 1, 2, 4, ... up to a limit."""
    return [2**n for n in range(limit.bit_length())]


# ---------------------------------------------------------------- figures and pictures


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
        "load_average": BUSY,
    }


def write(name, args, report, **found):
    """Write what was found, and what it depends on, to NAME.json here, and print a report of it."""
    record = {"written_by": WRITTEN_BY, "machine": machine(), "options": vars(args), **found}
    text = json.dumps(record, indent=1)
    Path(f"{name}.json").write_text(text, encoding="utf-8")
    print(report(json.loads(text)))


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
    import matplotlib.pyplot as plt  # here, so that what only prints does not need it

    about = {"Creator": WRITTEN_BY, "Date": None}
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(names, GREY) | {"svg.fonttype": "none"}):
        figure, axes = plt.subplots(layout="constrained", **options)
        yield axes
        figure.savefig(path, transparent=True, metadata=about | {"Title": title})
        plt.close(figure)
