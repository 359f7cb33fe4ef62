"""What talking costs: all_reduce by size of message, and ways to bring results together.

    torchrun --standalone --nproc-per-node=4 benchmarks/communication.py

Rank 0 prints the times and writes communication-N.json, N being the world size, from which
forecast.py fits the latency and the time per byte of this machine.
"""

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from shared import machine
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent / "slurm"))
from preflight import all_reduce_times, bus_bandwidth

MESSAGES = [4**n for n in range(1, 13)]  # bytes, 4 B to 16 MiB
PAYLOADS = [4**n for n in range(2, 11)]  # bytes per rank, 16 B to 1 MiB


def connecting_time():
    """Return the seconds that all ranks take to form one more process group and to meet in it."""
    dist.barrier()
    start = time.perf_counter()
    dist.barrier(dist.new_group())
    return time.perf_counter() - start


def gather_times(payload, repeats):
    """Return the median seconds that each way takes to bring a payload of bytes per rank together.

    To every rank: as objects, as tensors, or only their sum. To rank 0 alone: as objects.
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
    return statistics.median(seconds[1:])  # the first connects the ranks


def tables(reduced, gathered, ranks):
    """Return both results as Markdown."""
    lines = ["| bytes | all_reduce, ms | bus bandwidth, GB/s |", "|---|---|---|"]
    for size, seconds in reduced.items():
        speed = bus_bandwidth(size, seconds, ranks)
        lines.append(f"| {size:,} | {seconds * 1e3:.3f} | {speed:.3f} |")
    ways = list(next(iter(gathered.values())))
    lines += [
        "",
        f"| bytes per rank | {', ms | '.join(ways)}, ms |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for size, times in gathered.items():
        cells = [f"{times[way] * 1e3:.3f}" for way in ways]
        lines.append(f"| {size:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="per size (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=2**24, help="message (default: %(default)s)")
    args = parser.parse_args()
    if args.repeats < 1 or args.largest < MESSAGES[0]:
        parser.error("--repeats must be positive, and --largest at least 4")
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node=2 communication.py")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    messages = [size for size in MESSAGES if size <= args.largest]
    payloads = [size for size in PAYLOADS if size <= args.largest]
    reduced, gathered, connecting = {}, {}, connecting_time()
    for size in tqdm(messages, desc="all_reduce", disable=rank > 0):
        (reduced[size],) = all_reduce_times([size], repeats=args.repeats)
    for size in tqdm(payloads, desc="gathering", disable=rank > 0):
        gathered[size] = gather_times(size, args.repeats)
    if rank == 0:
        print(tables(reduced, gathered, ranks))
        print(f"\nA process group of {ranks} ranks is formed in {connecting:.3f} s.")
        record = {"machine": machine(), "world_size": ranks, "backend": dist.get_backend()}
        record |= {"all_reduce_seconds": reduced, "gather_seconds": gathered}
        record["connecting_seconds"] = connecting
        path = Path(f"communication-{ranks}.json")
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
