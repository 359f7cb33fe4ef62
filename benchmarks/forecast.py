"""How far it will scale: what a measured step and a measured network say of larger worlds.

    python benchmarks/forecast.py communication-2.json communication-3.json

fits latency and time per byte from what communication.py wrote at two or more world sizes, takes
the step from what breakdown.py wrote, and prints the efficiency of weak scaling to be expected.
A forecast is a straight line drawn far: it knows of no slower links beyond the nodes measured, and
of no other jobs. Measure again, with scaling.py, as soon as you have more nodes.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

WORLDS = (8, 64, 512, 4096)


def ring(ranks, size, alpha, beta):
    """Return the seconds of an all-reduce of size bytes around a ring.

    2 (n - 1) messages of size / n follow one another (Patarasuk and Yuan, 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002), each of alpha seconds and beta seconds per byte.
    """
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def tree(ranks, size, alpha, beta):
    """Return the seconds of an all-reduce up and down two binary trees, in small chunks.

    The latency grows with the depth only; each rank sends and receives all bytes once in either
    direction (Sanders, Speck and Träff, 2009, https://doi.org/10.1016/j.parco.2009.09.001).
    """
    return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * size * beta


def fit(measured):
    """Return alpha and beta from rows of (ranks, bytes, seconds) of a ring's all-reduce.

    Each row weighs by its relative error, so that small messages count as much as large ones, and
    neither result is negative (Lawson and Hanson's least squares, from SciPy).
    """
    steps = np.array([[ring(n, size, 1, 0), ring(n, size, 0, 1)] for n, size, _ in measured])
    seconds = np.array([row[2] for row in measured])
    scale = np.linalg.norm(steps / seconds[:, None], axis=0)  # alpha and beta are of other orders
    found, _ = nnls(steps / seconds[:, None] / scale, np.ones(len(measured)))
    return tuple(found / scale)


def waiting(communication, backward, buckets):
    """Return the seconds of communication that a step has to wait for.

    DDP sends a bucket of gradients as soon as these are ready, so that all but the last bucket can
    travel while backward still computes.
    """
    behind = communication / buckets
    return max(behind, communication - backward * (1 - 1 / buckets))


def efficiency(ranks, step, algorithm, network):
    """Return the share of a step that is not waiting, when all ranks keep their batch.

    step: {"seconds", "backward", "bytes", "buckets"} of one rank; network: (alpha, beta).
    """
    communication = algorithm(ranks, step["bytes"], *network) if ranks > 1 else 0
    idle = waiting(communication, step["backward"], step["buckets"])
    return step["seconds"] / (step["seconds"] + idle)


def variants(step):
    """Return the same step with what moves the limit."""
    eight = {"seconds": 8 * step["seconds"], "backward": 8 * step["backward"]}
    sums = {"seconds": 8 * step["seconds"]}  # only the last of eight backwards hides anything
    return {
        "as it is": step,
        "batch x 8": step | eight,
        "no_sync, 8 batches": step | sums,
        "bf16 gradients": step | {"bytes": step["bytes"] / 2},
    }


def table(step, network):
    """Return the forecast as Markdown."""
    lines = [f"| | all-reduce | {' | '.join(f'{n:,} ranks' for n in WORLDS)} |"]
    lines.append("|---" * (len(WORLDS) + 2) + "|")
    for name, changed in variants(step).items():
        for algorithm in (ring, tree):
            found = [efficiency(n, changed, algorithm, network) for n in WORLDS]
            cells = " | ".join(f"{share:.2f}" for share in found)
            lines.append(f"| {name} | {algorithm.__name__} | {cells} |")
    return "\n".join(lines)


def read(paths):
    """Return rows of (ranks, bytes, seconds) from files of communication.py."""
    rows = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        times = record["all_reduce_seconds"].items()
        rows += [(record["world_size"], int(size), seconds) for size, seconds in times]
    return rows


def read_step(path, bucket_mb):
    """Return the step of rank 0 that breakdown.py measured, its waiting left out."""
    record = json.loads(path.read_text(encoding="utf-8"))
    mine, size = record["milliseconds_by_rank"][0], record["gradient_bytes"]
    own = sum(mine[name] for name in ("data", "forward", "backward", "optimizer", "other"))
    step = {"seconds": own / 1e3, "backward": mine["backward"] / 1e3, "bytes": size}
    return step | {"buckets": math.ceil(size / (bucket_mb * 2**20))}


def main():
    style = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **style)
    parser.add_argument("communication", nargs="+", type=Path, help="from communication.py")
    parser.add_argument(
        "--breakdown", type=Path, default="breakdown.json", help="from breakdown.py"
    )
    parser.add_argument("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb")
    args = parser.parse_args()
    if not args.bucket_mb > 0:
        parser.error(f"bucket_mb must be positive, not {args.bucket_mb}")
    try:
        network = fit(read(args.communication))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"not from communication.py: {error!r}")
    try:
        step = read_step(args.breakdown, args.bucket_mb)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"not from breakdown.py: {error!r}")
    print(f"latency {network[0] * 1e6:.1f} us, {1e-9 / network[1]:.2f} GB/s, fitted to a ring")
    print(table(step, network))


if __name__ == "__main__":
    main()
