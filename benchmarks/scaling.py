"""Measure how much faster more processes train: strong and weak scaling of the real scripts.

    python benchmarks/scaling.py            1, 2, 4, ... processes on this machine
    sbatch slurm/scaling.sbatch             1, 2, 4, ... nodes of a cluster

Weak scaling keeps the batch per process. Strong scaling keeps the batch of all processes together,
so each gets a smaller part. Every repetition runs all sizes once, in random order, and compares
them only with each other.
"""

import itertools
import os
import random
import re
import statistics
import subprocess
import tempfile

import torch
from shared import (
    STEPS,
    TORCHRUN,
    cell,
    launcher,
    middle,
    parser_of,
    positive_int,
    powers_up_to,
    table,
    write,
)
from tqdm import tqdm

NODES = int(os.environ.get("SLURM_NNODES", 0)) if "SCALING_ENDPOINT" in os.environ else 0
PER_NODE = int(os.environ["SLURM_GPUS_ON_NODE"]) if NODES else 1
RUNS = itertools.count()


# ---------------------------------------------------------------- running


def srun(size):
    """Return the words that start a script with this many ranks on the nodes of the job."""
    nodes = size // PER_NODE
    words = ["srun", "--relative=0", f"--nodes={nodes}", f"--ntasks={nodes}"]
    words += ["--kill-on-bad-exit=1", TORCHRUN, f"--nnodes={nodes}"]
    host, port = os.environ["SCALING_ENDPOINT"].split(":")
    endpoint = f"{host}:{int(port) + next(RUNS)}"  # not the last run's port
    words += [f"--nproc-per-node={PER_NODE}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    return words


def plan(args):
    """Return what each repetition measures, as (kinds, world size, batch per process)."""
    sizes = [PER_NODE * count for count in powers_up_to(args.processes // PER_NODE)]
    together = args.batch_size * sizes[-1]
    runs = [(("weak",), size, args.batch_size) for size in sizes[:-1]]
    runs += [(("strong",), size, together // size) for size in sizes[:-1]]
    return [*runs, (("weak", "strong"), sizes[-1], args.batch_size)]


def measure(size, batch, args):
    """Return the median samples/s that a run prints, without the first epoch, a warm-up."""
    words = [*(srun(size) if NODES else launcher(size)), STEPS["04"]]
    words += [str(args.epochs), str(args.epochs), f"--batch-size={batch}", f"--width={args.width}"]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    # The checkpoint is saved here rather than in /tmp, which the nodes of a job do not share.
    with tempfile.TemporaryDirectory(prefix=".scaling-", dir=".") as folder:
        words.append(f"--checkpoint-path={folder}/checkpoint.pt")
        result = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stdout}{result.stderr}")
    found = re.findall(r"^epoch .* ([\d,]+) samples/s$", result.stdout, re.MULTILINE)
    return statistics.median(int(number.replace(",", "")) for number in found[1:])


# ---------------------------------------------------------------- showing


def summary(runs):
    """Return a row for each kind and world size: samples/s, and ratios within a repetition.

    "speed_up" is relative to the smallest size, "efficiency" is the speed-up per process.
    """
    speeds = {(r["kind"], r["world_size"], r["repetition"]): r["samples_per_second"] for r in runs}
    repetitions = sorted({r["repetition"] for r in runs})
    smallest = min(r["world_size"] for r in runs)
    rows = []
    for kind, size, batch in dict.fromkeys((r["kind"], r["world_size"], r["batch"]) for r in runs):
        own = [speeds[kind, size, n] for n in repetitions]
        ups = [o / speeds[kind, smallest, n] for n, o in enumerate(own)]
        row = {"kind": kind, "world_size": size, "batch": batch}
        row["samples_per_second"] = statistics.median(own)
        row["speed_up"] = middle(ups)
        row["efficiency"] = middle([up * smallest / size for up in ups])
        rows.append(row)
    return sorted(rows, key=lambda row: (row["kind"], row["world_size"]))


def report(record):
    """Return the summary as a Markdown table."""
    lines = [("scaling", "processes", "batch each", "samples/s", "speed-up", "efficiency")]
    for row in record["summary"]:
        cells = (row["kind"], row["world_size"], row["batch"], f"{row['samples_per_second']:,.0f}")
        lines.append((*cells, cell(row["speed_up"]), cell(row["efficiency"])))
    return table(*lines)


def parse_args():
    parser = parser_of(__doc__)
    processes = NODES * PER_NODE or torch.cuda.device_count() or os.cpu_count()
    number = {"type": positive_int}
    parser.add_argument("--processes", default=processes, help="largest world size", **number)
    parser.add_argument("--batch-size", default=128, help="per process, in weak scaling", **number)
    parser.add_argument("--width", default=32, help="of the model; 256 for GPUs", **number)
    parser.add_argument("--epochs", default=4, help="per run; the first is the warm-up", **number)
    parser.add_argument("--repeats", default=5, help="repetitions", **number)
    parser.add_argument("--threads", default=1, help="per process", **number)
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first is the warm-up")
    return args


def main():
    args = parse_args()
    runs, order = [], plan(args)
    with tqdm(total=args.repeats * len(order), unit="run") as progress:
        for repetition in range(args.repeats):
            random.shuffle(order)  # so that drift favours no size
            for kinds, size, batch in order:
                run = {"world_size": size, "batch": batch, "repetition": repetition}
                run["samples_per_second"] = measure(size, batch, args)
                runs += [{"kind": kind, **run} for kind in kinds]
                progress.update()
    write("scaling", args, report, summary=summary(runs), runs=runs)


if __name__ == "__main__":
    main()
