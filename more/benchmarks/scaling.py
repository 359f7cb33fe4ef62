"""Measure how much faster more processes train: strong and weak scaling of step 4.

    python more/benchmarks/scaling.py            1, 2, 4, ... processes on this machine
    sbatch slurm/scaling.sbatch             1, 2, 4, ... nodes of a cluster

In weak scaling, the batch per process stays the same. In strong scaling, the batch of all processes
together stays the same, so each gets a smaller part. Every round runs all sizes once, and compares
them only with each other.
"""

import itertools
import os
import re
import statistics
import tempfile
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


def speed(size, batch, args):
    """Train step 4; return the median samples/s that it prints, without the first epoch's."""
    words = [*(srun(size) if NODES else shared.launcher(size)), shared.STEPS["04"]]
    words += [str(args.epochs), str(args.epochs), f"--batch-size={batch}", f"--width={args.width}"]
    # The checkpoint is in this folder, because the nodes of a job do not share /tmp.
    with tempfile.TemporaryDirectory(prefix=".", dir=".") as folder:
        words.append(f"--checkpoint-path={folder}/checkpoint.pt")
        output = shared.run(words, OMP_NUM_THREADS=str(args.threads))
    found = re.findall(r"^epoch .* ([\d,]+) samples/s$", output, re.MULTILINE)
    return statistics.median(int(number.replace(",", "")) for number in found[1:])


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
    sizes = [PER_NODE * 2**n for n in range((args.processes // PER_NODE).bit_length())]
    together = args.batch_size * sizes[-1]
    plan = [("strong", size, together // size) for size in sizes]
    plan += [("weak", size, args.batch_size) for size in sizes]
    found = shared.rounds({one: partial(speed, *one[1:], args) for one in plan}, args.repeats)
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
