"""Measure communication by message size: all_reduce, and ways to collect results.

    torchrun --standalone --nproc-per-node=4 benchmarks/communication.py

Rank 0 prints the times and writes communication-N.json, where N is the world size.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
from shared import needs_torchrun, parser_of, positive_int, table, write

SIZES = [4**n for n in range(1, 13)]  # bytes per rank, 4 B to 16 MiB
LARGEST_OBJECT = 2**20


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


def ways(size):
    """Return the ways to collect so many bytes from each rank: {name: a function}.

    all_reduce gives every rank the sum, all_gather and all_gather_object give every rank all
    messages, gather_object gives them to rank 0 only.
    """
    mine = torch.zeros(size // 4, device="cuda" if torch.cuda.is_available() else "cpu")
    found = {"all_reduce": lambda: dist.all_reduce(mine)}
    if size <= LARGEST_OBJECT:
        everything = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        object_, objects = mine.tolist(), [None] * dist.get_world_size()
        on_rank_0 = objects if dist.get_rank() == 0 else None
        found["all_gather"] = lambda: dist.all_gather(everything, mine)
        found["all_gather_object"] = lambda: dist.all_gather_object(objects, object_)
        found["gather_object"] = lambda: dist.gather_object(object_, on_rank_0)
    return found


def report(record):
    """Return the milliseconds as a Markdown table."""
    names = dict.fromkeys(name for times in record["seconds"].values() for name in times)
    rows = [
        (f"{int(size):,}", *(f"{times[name] * 1e3:.2f}" if name in times else "" for name in names))
        for size, times in record["seconds"].items()
    ]
    return table((f"bytes of each of {record['world_size']} ranks", *names), *rows)


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=positive_int, default=20, help="per size")
    parser.add_argument("--largest", type=positive_int, default=2**24, help="message in bytes")
    args = parser.parse_args()
    needs_torchrun(parser)
    return args


def main():
    args = parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    found = {
        size: {name: seconds(way, args.repeats) for name, way in ways(size).items()}
        for size in SIZES
        if size <= args.largest
    }
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        write(f"communication-{ranks}", args, report, world_size=ranks, seconds=found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
