"""Measure how much faster more processes train: strong and weak scaling of step 4.

    python benchmarks/scaling.py            1, 2, 4, ... processes on this machine
    sbatch slurm/scaling.sbatch             1, 2, 4, ... nodes of a cluster

Weak scaling keeps the batch per process. Strong scaling keeps the batch of all processes together,
so each gets a smaller part. Every repetition runs all sizes once, and compares them only with each
other.
"""

import itertools
import os
import statistics
from functools import partial

import shared
import torch

NODES = int(os.environ.get("SLURM_NNODES", 0)) if "SCALING_ENDPOINT" in os.environ else 0
PER_NODE = int(os.environ["SLURM_GPUS_ON_NODE"]) if NODES else 1
RUNS = itertools.count()


def srun(size):
    """Return the words that start a script with this many ranks on the nodes of the job."""
    nodes = size // PER_NODE
    words = ["srun", "--relative=0", f"--nodes={nodes}", f"--ntasks={nodes}"]
    words += ["--kill-on-bad-exit=1", shared.TORCHRUN, f"--nnodes={nodes}"]
    host, port = os.environ["SCALING_ENDPOINT"].split(":")
    endpoint = f"{host}:{int(port) + next(RUNS)}"  # not the last run's port
    words += [f"--nproc-per-node={PER_NODE}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    return words


def measure(size, batch, args):
    start = srun(size) if NODES else shared.launcher(size)
    return shared.speed([*start, shared.STEPS["04"]], args, batch, threads=args.threads)


def report(record):
    """Return the summary as a Markdown table."""
    lines = [("scaling", "processes", "batch each", "samples/s", "speed-up", "efficiency")]
    for row in record["summary"]:
        cells = (row["kind"], row["world_size"], row["batch"], f"{row['samples_per_second']:,.0f}")
        lines.append((*cells, shared.cell(row["speed_up"]), shared.cell(row["efficiency"])))
    return shared.table(*lines)


def main():
    most = NODES * PER_NODE or torch.cuda.device_count() or os.cpu_count()
    counts = {"processes": (most, "at most"), "repeats": (5, "rounds")}
    args = shared.options(__doc__, **counts, **shared.TRAINING, threads=(1, "per process"))
    sizes = [PER_NODE * count for count in shared.powers_up_to(args.processes // PER_NODE)]
    together = args.batch_size * sizes[-1]
    plan = [("strong", size, together // size) for size in sizes]
    plan += [("weak", size, args.batch_size) for size in sizes]
    found = shared.rounds({run: partial(measure, *run[1:], args) for run in plan}, args.repeats)
    summary, base = [], {}
    for (kind, size, batch), speeds in found.items():
        ups = shared.relative(speeds, base.setdefault(kind, speeds))  # to the smallest size
        row = {"kind": kind, "world_size": size, "batch": batch, "speed_up": ups}
        row["samples_per_second"] = statistics.median(speeds)
        row["efficiency"] = {name: up * sizes[0] / size for name, up in ups.items()}
        summary.append(row)
    shared.write("scaling", args, report, summary=summary)


if __name__ == "__main__":
    main()
