"""Measure what grows with the ranks, the data and the model: the time and memory of a few things.

    python benchmarks/growth.py

Starting 2 to 16 ranks; gathering the predictions of each, as objects on rank 0 and as a tensor on
all; dealing out the samples of an epoch; saving. Ratios are to the smallest size of each.
"""

import os
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE, run

import shared
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler


def memory(what):
    """Return bytes of this process: now for VmRSS, or the most so far for VmHWM."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", status)[1])


def measured(function, *args):
    """Return the seconds that a call takes, and the bytes that it adds to the process's peak."""
    before, start = memory("VmRSS"), time.perf_counter()
    function(*args)
    return time.perf_counter() - start, max(0, memory("VmHWM") - before)


def alone(function, size):
    """Return what measured() does in a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measured, function, size).result()


def deal(samples):
    """List rank 0's samples of an epoch."""
    return list(DistributedSampler(range(samples), 2, rank=0))


def save(width):
    """Save the scripts' model and its optimizer."""
    model = shared.load("05").build_model(width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 1, 8, 8)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryFile() as file:
        start = time.perf_counter()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        os.fsync(file.fileno())
        return time.perf_counter() - start, file.tell()


def rank_of(predictions):
    """Join the group as a rank, and gather the predictions of all; rank 0 prints what it took."""
    dist.init_process_group("gloo")
    dist.barrier()
    started, used = time.time(), memory("VmRSS")
    mine = [(n, n % 10) for n in range(predictions)]
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    objects = measured(dist.gather_object, mine, gathered)
    parts = [torch.tensor(mine) for _ in range(dist.get_world_size())]
    seconds, _ = measured(dist.all_gather, parts, torch.tensor(mine))
    if dist.get_rank() == 0:
        print(started, used, *objects, seconds, sum(part.nbytes for part in parts))
    dist.barrier()
    dist.destroy_process_group()


def ranks(size, predictions):
    """Return (seconds, bytes) of the start of so many ranks, and of what they gather."""
    words = [*shared.launcher(size), __file__, f"--predictions={predictions}"]
    env, start = {**os.environ, "OMP_NUM_THREADS": "1"}, time.time()
    output = run(words, env=env, stdout=PIPE, text=True, check=True).stdout
    started, *found = map(float, output.split())
    return started - start, *found


def report(record):
    """Return the times and sizes as a Markdown table, with ratios to the smallest size."""
    rows = []
    for what, found in record["found"].items():
        _, first_seconds, first_bytes = found[0]
        for size, seconds, used in found:
            ratios = (f"{seconds / first_seconds:.1f}", f"{used / first_bytes:.1f}")
            cells = (f"{size:,}", f"{seconds:.3f}", ratios[0], f"{used / 1e6:,.0f}", ratios[1])
            rows.append((what, *cells))
    return shared.table(("what", "size", "seconds", "ratio", "MB", "ratio"), *rows)


def main():
    args = shared.options(
        __doc__,
        processes=(16, "the most ranks"),
        predictions=(100_000, "that a rank gathers"),
        samples=(10**7, "the most that are dealt out"),
        width=(256, "of the widest model"),
    )
    if "RANK" in os.environ:
        rank_of(args.predictions)
        return
    found = {}
    for size in shared.powers_up_to(args.processes)[1:]:
        numbers = ranks(size, args.predictions)
        names = ("start, by ranks", "gather_object, by ranks", "all_gather, by ranks")
        for name, seconds, used in zip(names, numbers[::2], numbers[1::2]):
            found.setdefault(name, []).append((size, seconds, used))
    sizes = (args.samples // 100, args.samples // 10, args.samples)
    found["sampler, by samples"] = [(size, *alone(deal, size)) for size in sizes]
    widths = (args.width // 4, args.width // 2, args.width)
    found["save, by width"] = [(width, *save(width)) for width in widths]
    shared.write("growth", args, report, found=found)


if __name__ == "__main__":
    main()
