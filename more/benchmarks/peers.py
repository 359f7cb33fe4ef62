"""Measure how fast step 5 is beside other programs that train the same model on the same data.

    python more/benchmarks/peers.py

The others are step 5 written with Accelerate, Fabric and the Hugging Face Trainer (in lookup/), a
bare DDP loop that neither saves nor evaluates, and step 5 with one line changed. Each round starts
all of them in a different order, and compares them with the step 5 of that round. As a rank, this
file runs one of the programs, and notes when it takes its steps.
"""

import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import shared
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

HERE = Path(__file__).resolve()
FORWARD = "loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)"
BUILD = "build_model(args.width)"
CHANGES = {
    "bf16 autocast": (
        FORWARD,
        f"with torch.autocast(source.device.type, torch.bfloat16): {FORWARD}",
    ),
    "torch.compile": (BUILD, f"torch.compile({BUILD}, dynamic=False)"),
}


def programs():
    """Return {name: the text of a program}, step 5 first."""
    names = ("Accelerate", "Fabric", "Trainer")
    paths = {name: shared.ROOT / "more" / "lookup" / f"with_{name.lower()}.py" for name in names}
    paths["bare loop"] = HERE.with_name("bare_loop.py")
    others = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    changed = {name: shared.changed("05", [change]) for name, change in CHANGES.items()}
    return {"step 5": shared.changed("05"), **others, **changed}


def watch(path, first, last):
    """Run a program as a rank, and write down when its first and last step of interest end."""
    steps, times = 0, []

    def after_step(*_):
        nonlocal steps
        steps += 1
        if steps in (first, last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.time())
            Path(path).with_name(f"times-{os.environ['RANK']}").write_text(json.dumps(times))

    register_optimizer_step_post_hook(after_step)
    sys.argv = [path, *sys.argv[4:]]
    runpy.run_path(path, run_name="__main__")


def speed(text, args):
    """Run a program; return its samples per second after the first epoch, saves included."""
    samples = len(shared.load("05").load_datasets()[0])
    steps = -(-samples // (args.processes * args.batch_size))  # in an epoch, rounded up
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(text, encoding="utf-8")
        words = [*shared.launcher(args.processes), HERE, path, steps, args.epochs * steps]
        words += [args.epochs, 1, f"--batch-size={args.batch_size}", f"--width={args.width}"]
        words.append(f"--checkpoint-path={folder}/checkpoint.pt")
        shared.run([str(word) for word in words], PYTHONPATH=str(shared.ROOT))
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("times-*")]
    begin, end = (max(moments) for moments in zip(*ranks))
    return (args.epochs - 1) * samples / (end - begin)


def report(record):
    """Return the results as a Markdown table."""
    rows = [(row["name"], shared.cell(row["speed"])) for row in record["programs"]]
    return shared.table(("program", "speed"), *rows)


def main():
    counts = {"processes": (2, "world size"), "repeats": (5, "rounds")}
    _, words = shared.TRAINING["epochs"]
    args = shared.options(__doc__, **counts, **{**shared.TRAINING, "epochs": (10, words)})
    runs = {name: partial(speed, text, args) for name, text in programs().items()}
    found, rows = shared.rounds(runs, args.repeats), []
    for name, speeds in found.items():
        row = {"name": name, "speed": shared.relative(speeds, found["step 5"])}
        rows.append({**row, "samples_per_second": statistics.median(speeds)})
    shared.write("peers", args, report, programs=rows)


if __name__ == "__main__":
    if "RANK" in os.environ:
        watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
