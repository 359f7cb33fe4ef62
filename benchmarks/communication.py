"""Measure communication: all_reduce by message size, and ways to collect results.

    torchrun --standalone --nproc-per-node=4 benchmarks/communication.py

Rank 0 prints the times and writes communication-N.json, where N is the world size. forecast.py fits
this machine's latency and time per byte to them.
"""

import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn
from shared import ROOT, parser_of, positive_int, table, write
from tqdm import tqdm

sys.path.append(str(ROOT / "slurm"))
from preflight import all_reduce_times, bus_bandwidth

MESSAGES = [4**n for n in range(1, 13)]  # bytes, 4 B to 16 MiB
PAYLOADS = [4**n for n in range(2, 11)]  # bytes per rank, 16 B to 1 MiB


def connecting_time():
    """Return the seconds that all ranks take to form another process group and pass a barrier."""
    dist.barrier()
    start = time.perf_counter()
    dist.barrier(dist.new_group())
    return time.perf_counter() - start


def gather_times(payload, repeats):
    """Return the median seconds that each way takes to collect a payload of bytes from each rank.

    all_reduce gives every rank the sum, all_gather and all_gather_object give every rank all
    payloads, gather_object gives them to rank 0 only.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = torch.zeros(payload // 4, device=device)
    everything = [torch.empty_like(mine) for _ in range(world_size)]
    object_, objects = mine.tolist(), [None] * world_size
    ways = {
        "all_reduce": lambda: dist.all_reduce(mine),
        "all_gather": lambda: dist.all_gather(everything, mine),
        "all_gather_object": lambda: dist.all_gather_object(objects, object_),
        "gather_object": lambda: dist.gather_object(object_, objects if rank == 0 else None),
    }
    return {name: timed(way, repeats) for name, way in ways.items()}


def timed(function, repeats):
    """Return the median seconds of a collective call, all ranks starting together."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first call also connects the ranks


def tables(reduced, gathered, ranks):
    """Return both results as Markdown."""
    rows = [("bytes", "all_reduce, ms", "bus bandwidth, GB/s")]
    for size, seconds in reduced.items():
        speed = bus_bandwidth(size, seconds, ranks)
        rows.append((f"{size:,}", f"{seconds * 1e3:.3f}", f"{speed:.3f}"))
    ways = list(next(iter(gathered.values())))
    collected = [("bytes per rank", *(f"{way}, ms" for way in ways))]
    for size, times in gathered.items():
        collected.append((f"{size:,}", *(f"{times[way] * 1e3:.3f}" for way in ways)))
    return f"{table(*rows)}\n\n{table(*collected)}"


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=positive_int, default=20, help="per size")
    parser.add_argument("--largest", type=int, default=2**24, help="message in bytes, at least 16")
    args = parser.parse_args()
    if args.largest < PAYLOADS[0]:
        parser.error(f"--largest must be at least {PAYLOADS[0]}")
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node=2 communication.py")
    return args


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    connecting = connecting_time()
    reduced, gathered = {}, {}
    messages = [size for size in MESSAGES if size <= args.largest]
    for size in tqdm(messages, desc="all_reduce", disable=rank > 0):
        (reduced[size],) = all_reduce_times([size], repeats=args.repeats)
    payloads = [size for size in PAYLOADS if size <= args.largest]
    for size in tqdm(payloads, desc="gathering", disable=rank > 0):
        gathered[size] = gather_times(size, args.repeats)
    if rank == 0:
        print(tables(reduced, gathered, ranks))
        print(f"\n{ranks} ranks formed a process group in {connecting:.3f} s.")
        found = {"all_reduce_seconds": reduced, "gather_seconds": gathered}
        found |= {"connecting_seconds": connecting, "backend": dist.get_backend()}
        write(f"communication-{ranks}", args, world_size=ranks, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
