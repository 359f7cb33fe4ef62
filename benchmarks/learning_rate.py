"""Measure how well the model learns with more processes, by the rule for the learning rate.

    python benchmarks/learning_rate.py

N processes with a batch of B train like one process with a batch of N x B. So each run is one
process, with the recipe recipes/learning_rate.md and the batch of all N together.
"""

import re
import tempfile
from pathlib import Path

import shared
from tqdm import tqdm

ROOT_RULE = "math.sqrt(batch / BATCH)"
RULES = {"same rate": "1", "square root": ROOT_RULE, "linear": "batch / BATCH"}
BATCH, _ = shared.TRAINING["batch_size"]


def accuracy(rule, processes, seed, args):
    """Train once; return the share of the held-out digits that is recognized."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        text = shared.changed("learning_rate", [(ROOT_RULE, RULES[rule])])
        path.write_text(text, encoding="utf-8")
        words = [*shared.launcher(1), path]
        output = shared.trained(words, args, processes * BATCH, f"--seed={seed}")
    correct, total = re.search(r"\((\d+)/(\d+)\)$", output.strip()).groups()
    return int(correct) / int(total)


def report(record):
    """Return the accuracies as a Markdown table, with a column for each rule."""
    cells = {(row["processes"], row["rule"]): shared.cell(row, ".1%") for row in record["summary"]}
    sizes = dict.fromkeys(size for size, _ in cells)
    lines = [(size, size * BATCH, *(cells[size, rule] for rule in RULES)) for size in sizes]
    return shared.table(("processes", "effective batch", *RULES), *lines)


def main():
    counts = {"processes": (8, "at most"), "seeds": (3, "runs of each kind")}
    args = shared.options(__doc__, **counts, epochs=(4, "per run"), width=shared.TRAINING["width"])
    summary = []
    for size in tqdm(shared.powers_up_to(args.processes), unit="size"):
        for rule in RULES:
            found = [accuracy(rule, size, seed, args) for seed in range(args.seeds)]
            summary.append({"rule": rule, "processes": size, **shared.middle(found)})
    shared.write("learning_rate", args, report, summary=summary)


if __name__ == "__main__":
    main()
