"""What the benchmarks share: runs of the scripts, command lines, figures, tables, pictures."""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from types import ModuleType

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
STEPS = {path.name[:2]: path for path in ROOT.glob("0[1-9]_*.py")}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
WRITTEN_BY = "benchmarks/all.py, or the script in benchmarks/ of this name"
BUSY = os.getloadavg()[0]  # what else runs here, when a benchmark starts
GREY = "#7d7d7d"  # readable on white and on black
TRAINING = {  # options of several programs, with a default and a help
    "batch_size": (128, "per process"),
    "width": (32, "of the model"),
    "epochs": (4, "per run; the first is a warm-up"),
}


# ---------------------------------------------------------------- the scripts


def replaced(text, changes, name):
    """Return a text with changes [(old, new)], of which each `old` is there once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise SystemExit(f"{old!r} is {text.count(old)} times in {name}")
        text = text.replace(old, new)
    return text


def changed(name, changes=()):
    """Return the text of a step, like "04", or of a recipe, with some of it replaced."""
    if name[:2] in STEPS:
        return replaced(STEPS[name[:2]].read_text(encoding="utf-8"), changes, name)
    page = ROOT / "recipes" / f"{name}.md"
    before = re.search(r"^--- (\w+)\.py$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as place:  # patch writes a file of its own there, too
        step = Path(place, "before.py")
        step.write_text(changed(before), encoding="utf-8")
        words = ["patch", "--quiet", "--output=-", step, page]
        result = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=place)
    return replaced(result.stdout, changes, name)


def load(name, changes=()):
    """Import what changed() returns."""
    module = ModuleType(name)
    exec(compile(changed(name, changes), name, "exec"), module.__dict__)
    return module


def launcher(ranks):
    """Return the words that start a script with this many ranks on this machine."""
    return [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}"]


def trained(words, args, batch_size, *more, threads=1):
    """Run a script that saves once, at its end; return what it prints."""
    words = [*words, str(args.epochs), str(args.epochs), f"--batch-size={batch_size}", *more]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # The checkpoint is saved here rather than in /tmp, which the nodes of a job do not share.
    with tempfile.TemporaryDirectory(prefix=".", dir=".") as folder:
        words += [f"--width={args.width}", f"--checkpoint-path={folder}/checkpoint.pt"]
        result = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stdout}{result.stderr}")
    return result.stdout


def speed(*args, **more):
    """Return the median samples/s that a script prints, without the first epoch's."""
    found = re.findall(r"^epoch .* ([\d,]+) samples/s$", trained(*args, **more), re.MULTILINE)
    return statistics.median(int(number.replace(",", "")) for number in found[1:])


# ---------------------------------------------------------------- command lines


def options(docstring, **numbers):
    """Return the options of a program, of which each has a default and a help."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0], formatter_class=style)
    for name, (default, words) in numbers.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=words)
    return parser.parse_args()


def powers_up_to(limit):
    """Return 1, 2, 4, ... up to a limit."""
    return [2**n for n in range(limit.bit_length())]


# ---------------------------------------------------------------- measuring in turn


def rounds(functions, repeats):
    """Call all functions in each round, in another order; return {name: [what it returned]}."""
    found = {name: [] for name in functions}
    with tqdm(total=repeats * len(functions), unit="run") as progress:
        for seed in range(repeats):
            for name in random.Random(seed).sample(list(functions), len(functions)):
                found[name].append(functions[name]())
                progress.update()
    return found


def middle(ratios):
    """Return the median of some ratios and their quartiles."""
    if len(ratios) == 1:
        return dict.fromkeys(("median", "low", "high"), ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def relative(values, base):
    """Return the middle of the ratios of what was measured in the same round."""
    return middle([value / other for value, other in zip(values, base, strict=True)])


# ---------------------------------------------------------------- figures and pictures


def machine():
    """Return what the figures depend on: date, hardware, versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "date": date.today().isoformat(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "load_average": BUSY,
    }


def write(name, args, report, **found):
    """Write what was found, and what it depends on, to NAME.json here, and print a report of it."""
    record = {"written_by": WRITTEN_BY, "machine": machine(), "options": vars(args), **found}
    text = json.dumps(record, indent=1)
    Path(f"{name}.json").write_text(text, encoding="utf-8")
    print(report(json.loads(text)))


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
