"""Forecast how training scales to more ranks, from a measured step and a measured network.

    python benchmarks/forecast.py communication-2.json communication-3.json

Fits latency and time per byte to what communication.py wrote at two or more world sizes, takes the
step from what breakdown.py wrote, prints the expected efficiency of weak scaling and what else
grows with the number of ranks, and draws forecast.svg. With --held-out communication-4.json it also
prints how far the fitted times are from those measured at that world size.

    python benchmarks/forecast.py --parameters 3e9 --network 25

For a GPT, prints the step time under DDP, FSDP2 and 2-D instead, from the speeds that the options
state. If the files are given as well, the network is the measured one.

This is an extrapolation. It does not account for slower links beyond the measured nodes, or for
other jobs. Measure again with scaling.py as soon as you have more nodes.
"""

import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls
from shared import GREY, drawing, parser_of, positive, table
from torch.utils.data.distributed import DistributedSampler
from which import WAYS, add_options, job_of, sent

WORLDS = (8, 64, 512, 4096)
SAMPLES = 1_281_167  # the size of ImageNet's training set


@dataclass(frozen=True)
class Step:
    """A training step of one rank, without waiting."""

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
    """Return the measured step, and variants of it that are more efficient."""
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


# ---------------------------------------------------------------- a GPT, split in different ways


@dataclass(frozen=True)
class Speed:
    """What a GPU and its links reach."""

    flops: float  # of a GPU, as training reaches them
    inside: float  # bytes per second that a GPU sends inside its node
    network: float  # and that a node sends
    latency: float  # seconds for a message to the next rank


def step_seconds(way, job, speed):
    """Return the forecast time of a step of DDP, FSDP2 or 2-D.

    A parameter takes 6 operations per token, and 2 more if forward is repeated. A ring is as fast
    as its slowest link, and its latency grows with the ranks: that of FSDP2's collectives, while an
    all-reduce can go up and down a tree. DDP sums gradients behind backward, two thirds of the
    time; FSDP2 gathers behind forward, too. Activations must arrive before the next layer starts.
    """
    compute = (8 if job.checkpointed else 6) * job.parameters * job.tokens / speed.flops
    inside, between = sent(way, job)
    network = between * job.gpus / speed.network
    if way == "ddp":
        buckets = math.ceil(4 * job.parameters / (25 * 2**20))
        hops = 2 * buckets * math.log2(job.ranks)
        moved = max((inside + between) / speed.inside, network)
        return compute + waiting(moved + hops * speed.latency, compute * 2 / 3, buckets)
    if way == "fsdp2_gpt":
        apart, ring_ranks, moved = 0, job.ranks, max((inside + between) / speed.inside, network)
    else:
        apart = inside / speed.inside + 8 * job.layers * (job.gpus - 1) * speed.latency
        ring_ranks, moved = job.nodes, network
    hops = 3 * job.layers * (ring_ranks - 1)
    return compute + apart + waiting(moved + hops * speed.latency, compute, job.layers)


def step_table(job, speed):
    """Return the step times as Markdown, on as many nodes as make up these ranks."""
    rows = [("step time", *(f"{ranks:,} ranks" for ranks in WORLDS))]
    for way in ("ddp", "fsdp2_gpt", "two_dimensional"):
        jobs = [replace(job, nodes=max(1, ranks // job.gpus)) for ranks in WORLDS]
        rows.append((WAYS[way], *(f"{step_seconds(way, one, speed):.2f} s" for one in jobs)))
    return table(*rows)


# ---------------------------------------------------------------- what else grows with the ranks


def sampler_seconds(ranks):
    """Return the seconds that DistributedSampler takes to list one rank's samples of an epoch."""
    sampler = DistributedSampler(range(SAMPLES), ranks, rank=0)
    start = time.perf_counter()
    list(sampler)
    return time.perf_counter() - start


def gathering(records):
    """Return the seconds per byte that all_gather_object collects, for the largest payload."""
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


def speed_of(args, records):
    """Return the speeds that are stated, and the network's as measured if there are records."""
    network, latency = args.network * 1e9, args.latency / 1e6
    if records:
        latency, byte = fitted(records)
        network = 1 / byte
    return Speed(args.tflops * 1e12, args.inside * 1e9, network, latency)


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


def fitted(records):
    """Fit alpha and beta to records of communication.py, and print them."""
    latency, byte = fit([row for record in records for row in rows_of(record)])
    print(f"latency {latency * 1e6:.1f} us, {1e-9 / byte:.2f} GB/s, fitted to a ring\n")
    return latency, byte


def read(path, program, keys):
    """Return what another benchmark wrote; exit if it did not write this file."""
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
    parser.add_argument("communication", nargs="*", type=Path, help="from communication.py")
    parser.add_argument("--held-out", type=Path, help="the same, for another world size")
    parser.add_argument(
        "--breakdown", type=Path, default="breakdown.json", help="from breakdown.py"
    )
    parser.add_argument("--bucket-mb", type=positive, default=25, help="DDP's bucket_cap_mb")
    gpt = parser.add_argument_group("the step time of a GPT")
    gpt.add_argument("--parameters", type=positive, help="of the model, such as 3e9")
    add_options(gpt)
    gpt.add_argument("--tflops", type=positive, default=125, help="of a GPU, as training gets them")
    gpt.add_argument("--inside", type=positive, default=250, help="GB/s of a GPU inside its node")
    gpt.add_argument("--network", type=positive, default=25, help="GB/s of a node's network")
    gpt.add_argument("--latency", type=positive, default=10, help="microseconds for a message")
    args = parser.parse_args()
    if not args.communication and not args.parameters:
        parser.error("give files from communication.py, or --parameters")
    return args


def main():
    args = parse_args()
    records = [read_communication(path) for path in args.communication]
    if args.parameters:
        print(step_table(job_of(args, nodes=1), speed_of(args, records)))
        return
    held_out = read_communication(args.held_out) if args.held_out else None
    step = step_of(read_breakdown(args.breakdown), args.bucket_mb)
    network = fitted(records)
    if held_out:
        found = errors(rows_of(held_out), network)
        median = statistics.median(map(abs, found.values()))
        sizes = ", ".join(f"{size:,} B {error:+.0%}" for size, error in found.items())
        print(f"error for the held-out world size: {median:.0%} in the median; {sizes}\n")
    draw(step, network, "forecast.svg")
    print(efficiency_table(step, network), "", sep="\n")
    print(f"An epoch of {SAMPLES:,} samples:\n")
    print(growth_table(step, gathering(records)))


if __name__ == "__main__":
    main()
