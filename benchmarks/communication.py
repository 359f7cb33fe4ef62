"""Measure communication: all_reduce by message size, and ways to collect results.

    torchrun --standalone --nproc-per-node=4 benchmarks/communication.py

Rank 0 prints the times and writes communication-N.json, where N is the world size. timeline.py fits
this machine's latency and time per byte to them.
"""

import os
import statistics
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from shared import needs_torchrun, parser_of, positive_int, table, write

MESSAGES = [4**n for n in range(1, 13)]  # bytes, 4 B to 16 MiB
PAYLOADS = [4**n for n in range(2, 11)]  # bytes per rank, 16 B to 1 MiB


def seconds(function, repeats):
    """Return the median seconds of a collective call, all ranks starting together."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])  # the first call also connects the ranks


def gathering(payload):
    """Return the ways to collect a payload of so many bytes from each rank: {name: a function}.

    all_reduce gives every rank the sum, all_gather and all_gather_object give every rank all
    payloads, gather_object gives them to rank 0 only.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = torch.zeros(payload // 4, device="cuda" if torch.cuda.is_available() else "cpu")
    everything = [torch.empty_like(mine) for _ in range(world_size)]
    object_, objects = mine.tolist(), [None] * world_size
    return {
        "all_reduce": lambda: dist.all_reduce(mine),
        "all_gather": lambda: dist.all_gather(everything, mine),
        "all_gather_object": lambda: dist.all_gather_object(objects, object_),
        "gather_object": lambda: dist.gather_object(object_, objects if rank == 0 else None),
    }


def tables(reduced, gathered, ranks):
    """Return both results as Markdown; a ring sends 2 (n - 1) / n times the message."""
    rows = [("bytes", "all_reduce, ms", "bus bandwidth, GB/s")]
    for size, time_ in reduced.items():
        speed = 2 * (ranks - 1) / ranks * size / time_ / 1e9
        rows.append((f"{size:,}", f"{time_ * 1e3:.3f}", f"{speed:.3f}"))
    collected = [("bytes per rank", *(f"{way}, ms" for way in gathering(4)))]
    for size, times in gathered.items():
        collected.append((f"{size:,}", *(f"{time_ * 1e3:.3f}" for time_ in times.values())))
    return f"{table(*rows)}\n\n{table(*collected)}"


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=positive_int, default=20, help="per size")
    parser.add_argument("--largest", type=positive_int, default=2**24, help="message in bytes")
    args = parser.parse_args()
    needs_torchrun(parser)
    return args


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    ranks = dist.get_world_size()
    dist.barrier()
    start = time.perf_counter()
    dist.barrier(dist.new_group())
    connecting = time.perf_counter() - start
    messages = {size: torch.zeros(size // 4) for size in MESSAGES if size <= args.largest}
    reduced = {
        size: seconds(partial(dist.all_reduce, message.cuda() if cuda else message), args.repeats)
        for size, message in messages.items()
    }
    gathered = {
        size: {name: seconds(way, args.repeats) for name, way in gathering(size).items()}
        for size in PAYLOADS
        if size <= args.largest
    }
    if dist.get_rank() == 0:
        print(tables(reduced, gathered, ranks))
        found = {"all_reduce_seconds": reduced, "gather_seconds": gathered}
        found |= {"connecting_seconds": connecting, "backend": dist.get_backend()}
        write(f"communication-{ranks}", args, world_size=ranks, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
