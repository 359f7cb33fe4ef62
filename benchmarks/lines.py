"""Measure what single lines of step 5 gain or cost: train with and without each, in turn.

    python benchmarks/lines.py

The speed of a machine drifts. So each round trains every variant once, and compares it with what
trained in the same round. Steps 2 and 5 are also compared with copies of step 1 that run at the
same time and never communicate: the most that these cores can do.
"""

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import shared

LOADER = "        sampler=sampler,\n"
FORWARD = "loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)"
BUILD = "build_model(args.width)"
DDP = "= DDP(model"
ASK = "step % 10 == 0 and self._stop_agreed()"
CHANGES = {  # what to replace in step 5: [(old, new)]
    "one loader worker": [
        (LOADER, f"{LOADER}        num_workers=1,\n        persistent_workers=True,\n")
    ],
    "bf16 autocast": [
        (FORWARD, f"with torch.autocast(source.device.type, torch.bfloat16): {FORWARD}")
    ],
    "torch.compile": [(BUILD, f"torch.compile({BUILD}, dynamic=False)")],
    "find_unused_parameters": [(DDP, f"{DDP}, find_unused_parameters=True")],
    "gradient_as_bucket_view": [(DDP, f"{DDP}, gradient_as_bucket_view=True")],
    "no vote": [(ASK, "False")],
    "a vote in each step": [(ASK, "self._stop_agreed()")],
}
AS_MANY, COPIES, THREADS = "01 with as many threads", "copies of 01", "2 threads per process"


def planned(args, folder):
    """Return {name: a function that trains it and returns its samples/s}, and pairs to compare."""

    def runs_of(start, script, *more, threads=1):
        return partial(
            shared.speed, [*start, script], args, args.batch_size, *more, threads=threads
        )

    def written(name, step, changes):
        path = Path(folder, f"{name}.py")
        path.write_text(shared.changed(step, changes), encoding="utf-8")
        return path

    def at_once():
        """Run step 1 as often as there are ranks, each on its own GPU, if any."""
        with ThreadPoolExecutor(args.processes) as pool:
            return sum(run.result() for run in [pool.submit(copy) for copy in copies])

    steps, python, torchrun = shared.STEPS, [sys.executable], shared.launcher(args.processes)
    gpus = [[('"cuda" if', f'"cuda:{n}" if')] for n in range(args.processes)]
    copies = [runs_of(python, written(f"copy {n}", "01", gpu)) for n, gpu in enumerate(gpus)]
    runs = {
        AS_MANY: runs_of(python, steps["01"], threads=args.processes),
        COPIES: at_once,
        "02": runs_of(python, steps["02"], f"--nprocs={args.processes}"),
        "05": runs_of(torchrun, steps["05"]),
        THREADS: runs_of(torchrun, steps["05"], threads=2),
    }
    pairs = [("02", AS_MANY), ("02", COPIES), ("05", COPIES), (THREADS, "05")]
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # torch.compile needs it
    for name, changes in CHANGES.items():
        if compiler or name != "torch.compile":
            runs[name] = runs_of(torchrun, written(name, "05", changes))
            pairs.append((name, "05"))
    return runs, pairs


def report(record):
    """Return the ratios as a Markdown table."""
    rows = [(row["name"], row["against"], shared.cell(row)) for row in record["ratios"]]
    return shared.table(("samples/s of", "relative to", "ratio (quartiles)"), *rows)


def main():
    counts = {"processes": (2, "world size"), "repeats": (5, "rounds")}
    args = shared.options(__doc__, **counts, **shared.TRAINING)
    with tempfile.TemporaryDirectory() as folder:
        runs, pairs = planned(args, folder)
        found = shared.rounds(runs, args.repeats)
    ratios = [{"name": a, "against": b, **shared.relative(found[a], found[b])} for a, b in pairs]
    shared.write(f"lines-{args.processes}-of-{args.batch_size}", args, report, ratios=ratios)


if __name__ == "__main__":
    main()
