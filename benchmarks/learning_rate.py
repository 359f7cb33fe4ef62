"""Measure how well the model learns with more processes, by the rule for the learning rate.

    python benchmarks/learning_rate.py

N processes with a batch of B train like one process with a batch of N x B. So each run is one
process, with the recipe recipes/learning_rate.md and the batch of all N together. The runs differ
in the rule for the rate, the number of processes and the seed.
"""

import contextlib
import io
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import torch
import torch.distributed as dist
from shared import cell, load, middle, parsed, parser_of, positive_int, powers_up_to, table, write
from tqdm import tqdm

ROOT_RULE = "math.sqrt(batch / BATCH)"
RULES = {"same rate": "1", "square root": ROOT_RULE, "linear": "batch / BATCH"}
BATCH = 128  # per process


def recipe(rule):
    """Import the recipe with this rule for the rate, and with a process group of one."""
    module = load("learning_rate", [(ROOT_RULE, RULES[rule])])
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    module.ddp_setup = lambda: dist.init_process_group("gloo", **alone)
    return module


def train(rule, processes, seed, epochs, width):
    """Train once; return how many of the held-out digits are recognized, and of how many."""
    torch.set_num_threads(1)
    module, output = recipe(rule), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        words = [str(epochs), str(epochs), f"--seed={seed}", f"--width={width}"]
        words += [f"--batch-size={processes * BATCH}", f"--checkpoint-path={folder}/checkpoint.pt"]
        module.main(parsed(module, words))
    correct, total = re.search(r"\((\d+)/(\d+)\)$", output.getvalue().strip()).groups()
    return int(correct), int(total)


def summary(runs):
    """Return a row for each rule and number of processes: the accuracy over the seeds."""
    found = {}
    for run in runs:
        found.setdefault((run["rule"], run["processes"]), []).append(run["correct"] / run["total"])
    return [{"rule": r, "processes": n, **middle(own)} for (r, n), own in found.items()]


def report(record):
    """Return the summary as a Markdown table, with a column for each rule."""
    cells = {(row["processes"], row["rule"]): cell(row, ".1%") for row in record["summary"]}
    sizes = dict.fromkeys(size for size, _ in cells)
    lines = [(size, size * BATCH, *(cells[size, rule] for rule in RULES)) for size in sizes]
    return table(("processes", "effective batch", *RULES), *lines)


def parse_args():
    parser = parser_of(__doc__)
    number = {"type": positive_int}
    parser.add_argument("--processes", default=8, help="largest number of processes", **number)
    parser.add_argument("--seeds", default=3, help="runs of each kind", **number)
    parser.add_argument("--epochs", default=4, help="per run", **number)
    parser.add_argument("--width", default=32, help="of the model", **number)
    return parser.parse_args()


def main():
    args = parse_args()
    kinds = list(product(RULES, powers_up_to(args.processes), range(args.seeds)))
    runs = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(train, *kind, args.epochs, args.width) for kind in kinds]
        for (rule, size, seed), result in zip(kinds, tqdm(started, unit="run"), strict=True):
            correct, total = result.result()
            run = {"rule": rule, "processes": size, "seed": seed}
            runs.append({**run, "correct": correct, "total": total})
    write("learning_rate", args, report, summary=summary(runs), runs=runs)


if __name__ == "__main__":
    main()
