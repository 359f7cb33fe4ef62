"""Forecast how training scales to more ranks, from a measured step and a measured network.

    python benchmarks/forecast.py communication-2.json communication-3.json

Fits latency and time per byte to what communication.py wrote at two or more world sizes, takes the
step from what breakdown.py wrote, prints the expected efficiency of weak scaling and what else
grows with the number of ranks, and draws forecast.svg. With --held-out communication-4.json it also
prints how far the fitted times are from those measured at that world size.

This is an extrapolation. It knows nothing of slower links beyond the measured nodes, or of other
jobs. Measure again with scaling.py as soon as you have more nodes.
"""

import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls
from shared import GREY, drawing, parser_of, table
from torch.utils.data.distributed import DistributedSampler

WORLDS = (8, 64, 512, 4096)
SAMPLES = 1_281_167  # the size of ImageNet's training set


@dataclass(frozen=True)
class Step:
    """A training step of one rank, without its waiting."""

    seconds: float
    backward: float  # seconds, of which communication can hide behind all but the last bucket's
    size: int  # of the gradients, in bytes
    buckets: int
    batch: int


def ring(ranks, size, alpha, beta):
    """Return the seconds of an all-reduce of size bytes around a ring.

    It takes 2 (n - 1) messages of size / n in sequence (Patarasuk and Yuan, 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002). Each takes alpha seconds and beta per byte.
    """
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def tree(ranks, size, alpha, beta):
    """Return the seconds of an all-reduce up and down two binary trees, in small chunks.

    The latency grows with the depth only. Each rank sends and receives all bytes once in each
    direction (Sanders, Speck and Träff, 2009, https://doi.org/10.1016/j.parco.2009.09.001).
    """
    return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * size * beta


def fit(measured):
    """Return alpha and beta from rows of (ranks, bytes, seconds) of a ring's all-reduce.

    The relative errors are minimized, so that small messages count as much as large ones, and
    neither result is negative (non-negative least squares, from SciPy).
    """
    steps = np.array([[ring(n, size, 1, 0), ring(n, size, 0, 1)] for n, size, _ in measured])
    seconds = np.array([row[2] for row in measured])
    scale = np.linalg.norm(steps / seconds[:, None], axis=0)  # alpha and beta differ by orders
    found, _ = nnls(steps / seconds[:, None] / scale, np.ones(len(measured)))
    return tuple(found / scale)


def waiting(communication, backward, buckets):
    """Return the seconds of communication that a step has to wait for.

    DDP sends a bucket of gradients as soon as they are ready, so all but the last bucket can be
    sent while backward is still computing.
    """
    behind = communication / buckets
    return max(behind, communication - backward * (1 - 1 / buckets))


def efficiency(ranks, step, algorithm, network):
    """Return the share of a step that is not spent waiting, if all ranks keep their batch.

    algorithm: ring or tree; network: (alpha, beta).
    """
    communication = algorithm(ranks, step.size, *network) if ranks > 1 else 0
    idle = waiting(communication, step.backward, step.buckets)
    return step.seconds / (step.seconds + idle)


def variants(step):
    """Return the step as measured, and with what raises its efficiency."""
    seconds = 8 * step.seconds
    return {
        "as it is": step,
        "batch x 8": replace(step, seconds=seconds, backward=8 * step.backward),
        "no_sync, 8 batches": replace(step, seconds=seconds),  # only the last backward overlaps
        "bf16 gradients": replace(step, size=step.size / 2),
    }


def efficiency_table(step, network):
    """Return the forecast as Markdown."""
    rows = [("", "all-reduce", *(f"{n:,} ranks" for n in WORLDS))]
    for name, changed in variants(step).items():
        for algorithm in (ring, tree):
            found = [efficiency(n, changed, algorithm, network) for n in WORLDS]
            rows.append((name, algorithm.__name__, *(f"{share:.2f}" for share in found)))
    return table(*rows)


def draw(step, network, path):
    """Draw the efficiency over the number of ranks, for each row of the table."""
    worlds = [2**n for n in range(13)]
    # The widths differ because some lines coincide.
    lines = (("#2f81f7", 4), ("#2da44e", 3), ("#8250df", 1.5), ("#d9730d", 1.5))
    with drawing(path, "Forecast of the efficiency", figsize=(8, 4)) as axis:
        for (name, changed), (colour, width) in zip(variants(step).items(), lines, strict=True):
            for algorithm, style in ((ring, "-"), (tree, "--")):
                found = [efficiency(n, changed, algorithm, network) for n in worlds]
                label = f"{name}, {algorithm.__name__}"
                axis.plot(worlds, found, style, color=colour, linewidth=width, label=label)
        axis.axhline(0.5, color=GREY, linewidth=0.8)
        axis.text(1, 0.51, "half of the time is spent waiting", color=GREY)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="ranks", ylabel="efficiency", xticks=worlds[::2], ylim=(0, 1.03))
        axis.set_xticklabels([f"{n:,}" for n in worlds[::2]])
        axis.figure.legend(loc="outside right center", frameon=False)


def sampler_seconds(ranks):
    """Return the seconds that DistributedSampler takes to list one rank's samples of an epoch."""
    sampler = DistributedSampler(range(SAMPLES), ranks, rank=0)
    start = time.perf_counter()
    list(sampler)
    return time.perf_counter() - start


def gathering(records):
    """Return the seconds for each byte that all_gather_object collects, by the largest payload."""
    found = []
    for record in records:
        payload, ways = max(record["gather_seconds"].items(), key=lambda item: int(item[0]))
        found.append(ways["all_gather_object"] / record["world_size"] / int(payload))
    return statistics.median(found)


def growth_table(step, per_byte):
    """Return as Markdown what else grows with the number of ranks: index lists, gathered objects.

    Every rank shuffles the list of all samples, while its share of them shrinks. The time to gather
    a MiB from each rank on every rank is extrapolated from the time per byte.
    """
    rows = [("ranks", "sampler's list", "share of the epoch", "all_gather_object of 1 MiB each")]
    for ranks in WORLDS:
        seconds = sampler_seconds(ranks)
        share = seconds / (seconds + SAMPLES / ranks / step.batch * step.seconds)
        gathered = f"{ranks * 2**20 * per_byte:,.1f} s, {ranks / 2**10:.2f} GiB on every rank"
        rows.append((f"{ranks:,}", f"{seconds:.2f} s", f"{share:.1%}", gathered))
    return table(*rows)


def errors(measured, network):
    """Return {bytes: forecast over measured seconds, minus 1} for rows as in fit()."""
    return {size: ring(n, size, *network) / seconds - 1 for n, size, seconds in measured}


def rows_of(record):
    """Return a record of communication.py as rows of (ranks, bytes, seconds)."""
    times = record["all_reduce_seconds"].items()
    return [(record["world_size"], int(size), seconds) for size, seconds in times]


def step_of(record, bucket_mb):
    """Return the step of rank 0 in a record of breakdown.py."""
    mine, size = record["milliseconds_by_rank"][0], record["gradient_bytes"]
    own = sum(mine[name] for name in ("data", "forward", "backward", "optimizer", "other"))
    return Step(
        seconds=own / 1e3,
        backward=mine["backward"] / 1e3,
        size=size,
        buckets=math.ceil(size / (bucket_mb * 2**20)),
        batch=record["options"]["batch_size"],
    )


def read(path, program, keys):
    """Return what another benchmark wrote; end if it did not write this file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {key: record[key] for key in keys}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is not from {program}: {error!r}") from error


def read_communication(path):
    return read(path, "communication.py", ("world_size", "all_reduce_seconds", "gather_seconds"))


def read_breakdown(path):
    return read(path, "breakdown.py", ("milliseconds_by_rank", "gradient_bytes", "options"))


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("communication", nargs="+", type=Path, help="from communication.py")
    parser.add_argument("--held-out", type=Path, help="from communication.py with another world")
    parser.add_argument(
        "--breakdown", type=Path, default="breakdown.json", help="from breakdown.py"
    )
    parser.add_argument("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb")
    args = parser.parse_args()
    if not args.bucket_mb > 0:
        parser.error("--bucket-mb must be positive")
    return args


def main():
    args = parse_args()
    records = [read_communication(path) for path in args.communication]
    held_out = read_communication(args.held_out) if args.held_out else None
    step = step_of(read_breakdown(args.breakdown), args.bucket_mb)
    network = fit([row for record in records for row in rows_of(record)])
    latency, byte = network
    print(f"latency {latency * 1e6:.1f} us, {1e-9 / byte:.2f} GB/s, fitted to a ring")
    if held_out:
        found = errors(rows_of(held_out), network)
        median = statistics.median(map(abs, found.values()))
        sizes = ", ".join(f"{size:,} B {error:+.0%}" for size, error in found.items())
        print(f"error for the held-out world size: {median:.0%} in the median; {sizes}")
    draw(step, network, "forecast.svg")
    print("", efficiency_table(step, network), "", sep="\n")
    print(f"An epoch of {SAMPLES:,} samples:\n")
    print(growth_table(step, gathering(records)))


if __name__ == "__main__":
    main()
