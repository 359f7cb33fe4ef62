"""Measure how much faster more processes train: strong and weak scaling of the real scripts.

    python benchmarks/scaling.py            1, 2, 4, ... processes on this machine
    sbatch slurm/scaling.sbatch             1, 2, 4, ... nodes of a cluster

Weak scaling keeps the batch per process. Strong scaling keeps the batch of all processes together,
so each gets a smaller part. Every repetition runs all sizes once, in random order, and compares
them only with each other. On one machine, each size is also compared with the same number of copies
of step 1, which run side by side and never communicate: the most that these cores can do.
"""

import itertools
import os
import random
import re
import statistics
import subprocess
import sys
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


def speed(process):
    """Return the median samples/s that a run prints, without the first epoch, a warm-up."""
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))}\n{output}{errors}")
    found = re.findall(r"^epoch .* ([\d,]+) samples/s$", output, re.MULTILINE)
    return statistics.median(int(number.replace(",", "")) for number in found[1:])


def run_together(commands, threads):
    """Run commands side by side; return the sum of their samples/s."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    options = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # The checkpoints are saved here rather than in /tmp, which the nodes of a job do not share.
    with tempfile.TemporaryDirectory(prefix=".scaling-", dir=".") as folder:
        running = [
            subprocess.Popen([*words, f"--checkpoint-path={folder}/{number}.pt"], **options)
            for number, words in enumerate(commands)
        ]
        return sum(map(speed, running))


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
    runs += [(("weak", "strong"), sizes[-1], args.batch_size)]
    if not NODES:
        runs += [(("copies",), size, args.batch_size) for size in sizes]
    return runs


def measure(kinds, size, batch, args):
    """Return the samples/s of all processes together."""
    words = [str(args.epochs), str(args.epochs), f"--batch-size={batch}", f"--width={args.width}"]
    if "copies" in kinds:
        return run_together([[sys.executable, STEPS["01"], *words]] * size, args.threads)
    start = srun(size) if NODES else launcher(size)
    return run_together([[*start, STEPS["04"], *words]], args.threads)


# ---------------------------------------------------------------- showing


def summary(runs):
    """Return a row for each kind and world size: samples/s, and ratios within a repetition.

    "speed_up" is relative to the smallest size, "efficiency" is the speed-up per process, and
    "of_copies" is relative to the same number of copies of step 1, if these were run.
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
        if kind == "weak" and ("copies", size, 0) in speeds:
            row["of_copies"] = middle([o / speeds["copies", size, n] for n, o in enumerate(own)])
        rows.append(row)
    return sorted(rows, key=lambda row: (row["kind"], row["world_size"]))


def report(record):
    """Return the summary as a Markdown table."""
    ratios = {"speed_up": "speed-up", "efficiency": "efficiency", "of_copies": "of copies"}
    lines = [("scaling", "processes", "batch each", "samples/s", *ratios.values())]
    for row in record["summary"]:
        cells = (row["kind"], row["world_size"], row["batch"], f"{row['samples_per_second']:,.0f}")
        lines.append((*cells, *(cell(row[name]) if name in row else "" for name in ratios)))
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
                run["samples_per_second"] = measure(kinds, size, batch, args)
                runs += [{"kind": kind, **run} for kind in kinds]
                progress.update()
    write("scaling", args, report, summary=summary(runs), runs=runs)


if __name__ == "__main__":
    main()
