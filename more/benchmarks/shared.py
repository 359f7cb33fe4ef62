"""What the benchmarks share: runs of the scripts, command lines, ratios, tables."""

import argparse
import json
import os
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

ROOT = Path(__file__).resolve().parents[2]
STEPS = {path.name[:2]: path for path in ROOT.glob("0[1-9]_*.py")}
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TRAINING = {  # options of several programs, each with a default and a help
    "batch_size": (128, "per process"),
    "width": (32, "of the model"),
    "epochs": (4, "per run; the first is a warm-up"),
}


def replaced(text, changes, name):
    """Return a text with changes [(old, new)]; each `old` must occur in it exactly once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise SystemExit(f"{old!r} occurs {text.count(old)} times in {name}")
        text = text.replace(old, new)
    return text


def changed(name, changes=()):
    """Return the text of a step, like "04", or of a recipe, with some of it replaced."""
    if name[:2] in STEPS:
        return replaced(STEPS[name[:2]].read_text(encoding="utf-8"), changes, name)
    page = ROOT / "more" / "recipes" / f"{name}.md"
    before = re.search(r"^--- (\w+)\.py$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:  # patch writes a file of its own there, too
        script = Path(folder, "before.py")
        script.write_text(changed(before), encoding="utf-8")
        words = ["patch", "--quiet", "--output=-", script, page]
        result = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    return replaced(result.stdout, changes, name)


def load(name, changes=()):
    """Import what changed() returns."""
    module = ModuleType(name)
    exec(compile(changed(name, changes), name, "exec"), module.__dict__)
    return module


def launcher(ranks):
    """Return the words that start a script with this many ranks on this machine."""
    return [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}"]


def run(words, **more_env):
    """Run a command with one thread per process; return what it prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more_env}
    result = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stdout}{result.stderr}")
    return result.stdout


def options(docstring, **numbers):
    """Parse the options of a program, each of which has a default and a help."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0], formatter_class=style)
    for name, (default, words) in numbers.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=words)
    return parser.parse_args()


def rounds(functions, repeats):
    """Call all functions in each round, in a different order; return {name: [its results]}."""
    found = {name: [] for name in functions}
    with tqdm(total=repeats * len(functions), unit="run") as progress:
        for seed in range(repeats):
            for name in random.Random(seed).sample(list(functions), len(functions)):
                found[name].append(functions[name]())
                progress.update()
    return found


def relative(values, base):
    """Return the median and the quartiles of the ratios within the same round."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    if len(ratios) == 1:
        return dict.fromkeys(("median", "low", "high"), ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def write(name, args, report, **found):
    """Write the results, and what they depend on, to NAME.json; print a table of them."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    machine = {
        "date": date.today().isoformat(),
        "cpu": cpu[1] if cpu else "",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    record = {"machine": machine, "options": vars(args), **found}
    Path(f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(report(record))
    return record


def cell(ratio):
    """Return what relative() returned as a cell of a table."""
    median, low, high = (f"{ratio[name]:.2f}" for name in ("median", "low", "high"))
    return f"{median} ({low}–{high})"  # noqa: RUF001  # an en dash


def table(*rows):
    """Return rows as a Markdown table; the first is the heading."""
    heading, *rows = ([str(word) for word in row] for row in rows)
    lines = [" | ".join(row) for row in (heading, ["---"] * len(heading), *rows)]
    return "\n".join(f"| {line} |" for line in lines)
