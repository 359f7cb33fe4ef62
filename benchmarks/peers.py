"""Run step 5 beside what readers would use instead, with the same model, data, batch and ranks.

    python benchmarks/peers.py

The programs are step 5; those in lookup/ for Accelerate, Fabric and the Hugging Face Trainer; what
PyTorch's DDP series ends with; and a bare loop with DDP. Each round starts all of them, in another
order, and compares them with the step 5 of that round. Then each is told to stop, or killed, in the
middle of its second epoch, and started once more.
"""

import ast
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import shared

PROGRAMS = Path(__file__).resolve().parent / "programs"
FORMS = {  # what is compared, and how its value is written
    "samples/s": "{:,.0f}".format,
    "first step": "{:.1f} s".format,
    "memory": lambda size: f"{size / 2**20:,.0f} MiB",
}
STOPS = {"SIGKILL repeats": "SIGKILL", "SIGTERM repeats": "SIGTERM"}


# ---------------------------------------------------------------- the programs


def programs():
    """Return {name: the text of a program}, step 5 first."""
    names = ("Accelerate", "Fabric", "Trainer")
    paths = {name: shared.ROOT / "lookup" / f"with_{name.lower()}.py" for name in names}
    paths |= {"DDP series": PROGRAMS / "ddp_series.py", "bare loop": PROGRAMS / "bare_loop.py"}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return {"step 5": shared.changed("05"), **texts}


def lines(text):
    """Count the lines with something on them, without step 5's data, model and arguments."""
    given = ("load_datasets", "build_model", "parse_args")
    parts = [part for part in ast.parse(text).body if getattr(part, "name", "") in given]
    borrowed = {line for part in parts for line in range(part.lineno, part.end_lineno + 1)}
    return sum(n not in borrowed for n, line in enumerate(text.splitlines(), 1) if line.strip())


def steps_of(args):
    """Return how many steps a rank takes in an epoch."""
    share = -(-len(shared.load("05").load_datasets()[0]) // args.processes)
    return -(-share // args.batch_size)


def run(text, args, folder, epochs, **watched):
    """Run a program, which saves and notes its steps in a folder; return what it prints."""
    path = Path(folder, "program.py")
    path.write_text(text, encoding="utf-8")
    words = [*shared.launcher(args.processes), PROGRAMS / "watched.py", path, str(epochs), "1"]
    words += [f"--batch-size={args.batch_size}", f"--width={args.width}"]
    words += [f"--checkpoint-path={folder}/checkpoint.pt"]
    env = {**os.environ, "WATCHED": json.dumps({"folder": folder, **watched})}
    env |= {"PYTHONPATH": str(shared.ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    result = subprocess.run(words, env=env, cwd=folder, check=False, timeout=1800, **pipes)
    if result.returncode and "signal" not in watched:
        raise SystemExit(f"{text}\n{result.stdout}")
    return result.stdout


def timed(text, args):
    """Return {what is compared: its value}."""
    steps, start = steps_of(args), time.time()
    with tempfile.TemporaryDirectory() as folder:
        run(text, args, folder, args.epochs, steps=[1, steps, args.epochs * steps])
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("times-*")]
    first, begin, end = (max(moments) for moments in zip(*(rank["times"] for rank in ranks)))
    samples = (args.epochs - 1) * len(shared.load("05").load_datasets()[0])
    return {
        "samples/s": samples / (end - begin),  # after the first epoch
        "first step": first - start,
        "memory": max(rank["peak"] for rank in ranks),
    }


def stopped(text, args):
    """Stop a program in the middle of its second epoch, and start it once more.

    Return how many steps it takes twice, for each signal, and how many samples it evaluates.
    """
    steps, row = steps_of(args), {}
    at = steps + steps // 2
    for number in (signal.SIGKILL, signal.SIGTERM):
        with tempfile.TemporaryDirectory() as folder:
            run(text, args, folder, 2, steps=[], at=at, signal=number)
            output = run(text, args, folder, 2, steps=[], at=at)
            row[number.name] = Path(folder, "steps-0").stat().st_size - 2 * steps
    counted = re.search(r"^accuracy .* \((\d+)/\d+\)$", output, re.MULTILINE)
    return {**row, "counted": int(counted[1]) if counted else None}


# ---------------------------------------------------------------- showing


def report(record):
    """Return what was found as a Markdown table."""
    first, *_ = rows = record["programs"]
    lines = [("program", *FORMS, "lines", *STOPS, "samples evaluated")]
    for row in rows:
        cells = [shared.cell(row[what]) for what in FORMS]
        if row is first:
            cells = [form(row[what]["value"]) for what, form in FORMS.items()]
        repeats = (f"{row[name]} steps" for name in STOPS.values())
        lines.append((row["name"], *cells, row["lines"], *repeats, row["counted"] or "none"))
    return shared.table(*lines)


def main():
    counts = {"processes": (2, "world size"), "repeats": (5, "rounds")}
    _, words = shared.TRAINING["epochs"]
    args = shared.options(__doc__, **counts, **{**shared.TRAINING, "epochs": (10, words)})
    texts = programs()
    runs = {name: partial(timed, text, args) for name, text in texts.items()}
    found = shared.rounds(runs, args.repeats)
    rows = []
    for name, text in texts.items():
        row = {"name": name, "lines": lines(text), **stopped(text, args)}
        for what in FORMS:
            own, base = ([each[what] for each in found[which]] for which in (name, "step 5"))
            row[what] = {"value": median(own), **shared.relative(own, base)}
        rows.append(row)
    shared.write("peers", args, report, programs=rows)


if __name__ == "__main__":
    main()
