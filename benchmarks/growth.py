"""Measure what grows with the ranks, the data and the model: the time and memory of four things.

    python benchmarks/growth.py

Starting 2 to 16 ranks; gathering the predictions of each on rank 0; dealing out the samples of an
epoch; saving. Ratios are to the smallest size of each.
"""

import os
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE, run

import torch
import torch.distributed as dist
from shared import launcher, load, parser_of, positive_int, powers_up_to, table, write
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
    model = load("05").build_model(width)
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
    seconds, size = measured(dist.gather_object, mine, gathered)
    if dist.get_rank() == 0:
        print(started, used, seconds, size)
    dist.barrier()
    dist.destroy_process_group()


def ranks(size, predictions):
    """Return (seconds, bytes) of the start of so many ranks, and of what they gather."""
    words = [*launcher(size), __file__, f"--as-rank={predictions}"]
    env, start = {**os.environ, "OMP_NUM_THREADS": "1"}, time.time()
    output = run(words, env=env, stdout=PIPE, text=True, check=True).stdout
    started, used, seconds, gathered = map(float, output.split())
    return (started - start, used), (seconds, gathered)


def report(record):
    """Return the times and sizes as a Markdown table, with ratios to the smallest size."""
    rows = []
    for what, found in record["found"].items():
        _, first_seconds, first_bytes = found[0]
        for size, seconds, used in found:
            ratios = (f"{seconds / first_seconds:.1f}", f"{used / first_bytes:.1f}")
            cells = (f"{size:,}", f"{seconds:.3f}", ratios[0], f"{used / 1e6:,.0f}", ratios[1])
            rows.append((what, *cells))
    return table(("what", "size", "seconds", "ratio", "MB", "ratio"), *rows)


def parse_args():
    parser = parser_of(__doc__)
    number = {"type": positive_int}
    parser.add_argument("--processes", default=16, help="the most ranks", **number)
    parser.add_argument("--predictions", default=100_000, help="that a rank gathers", **number)
    parser.add_argument("--samples", default=10**7, help="the most that are dealt out", **number)
    parser.add_argument("--width", default=256, help="of the widest model", **number)
    parser.add_argument("--as-rank", type=int, help="internal: be a rank, with predictions")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.as_rank is not None:
        rank_of(args.as_rank)
        return
    names = ("start, by ranks", "gather_object, by ranks", "sampler, by samples", "save, by width")
    found = {name: [] for name in names}
    start, gather, sampler, saved = found.values()
    for size in powers_up_to(args.processes)[1:]:
        begun, gathered = ranks(size, args.predictions)
        start.append((size, *begun))
        gather.append((size, *gathered))
    for samples in (args.samples // 100, args.samples // 10, args.samples):
        sampler.append((samples, *alone(deal, samples)))
    for width in (args.width // 4, args.width // 2, args.width):
        saved.append((width, *save(width)))
    write("growth", args, report, found=found)


if __name__ == "__main__":
    main()
