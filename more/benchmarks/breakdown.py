"""Measure how long the parts of a training step take on the CPU, and how much DDP hides.

    torchrun --standalone --nproc-per-node=2 more/benchmarks/breakdown.py

It runs step 5 under torch.profiler, prints the mean milliseconds of each part, and writes them to
breakdown.json. The default model fits into one of DDP's buckets of 25 MB. To see several, make the
model wider and the buckets smaller: --width=128 --batch-size=8 --bucket-mb=0.25.

With --figure=diffs/figures/where-the-time-goes.json, the fastest step is written into the data of
the figure on diffs/index.html, with the duration of some steps that the figure predicts.
"""

import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import shared
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

PARTS = ("data", "forward", "backward", "waiting", "optimizer")
PREDICTED = [  # steps whose duration the figure predicts
    {"batch": 4, "passes": 1, "no_sync": True},
    {"batch": 1, "passes": 4, "no_sync": True},
    {"batch": 1, "passes": 4, "no_sync": False},
]
DDP = "self.model = DDP(model"
TRAIN = "    trainer.train(args.total_epochs, args.save_every)\n"


def profiled(args, steps, batch=1, passes=1, no_sync=True):
    """Take some steps; return the profiler, the Trainer, and the shortest step in milliseconds."""
    changes = [(DDP, f"{DDP}, bucket_cap_mb={args.bucket_mb or None}")]
    script = shared.load("05", [*changes, (TRAIN, f"    return trainer\n{TRAIN}")])
    sys.argv[1:] = [f"--batch-size={batch * args.batch_size}", f"--width={args.width}"]
    sys.argv.append("--checkpoint-path=.breakdown.pt")
    trainer = script.train_and_evaluate(torch.device("cpu"), script.parse_args())
    take(5, trainer, passes, no_sync)  # a warm-up
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        shortest = take(steps, trainer, passes, no_sync)
    return profiler, trainer, shortest


def take(steps, trainer, passes, no_sync):
    """Take steps of so many passes; return the milliseconds of the shortest."""
    batches, times = iter(trainer.train_loader), []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.optimizer.zero_grad()
        for left in reversed(range(passes)):
            source, targets = next(batches)
            with trainer.model.no_sync() if left and no_sync else nullcontext():
                torch.nn.functional.cross_entropy(trainer.model(source), targets).backward()
        trainer.optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def spans(events, origin, *names):
    """Return (start, end) of the ranges of these names, in milliseconds of the machine's clock."""
    ranges = [event.time_range for event in events if event.name.startswith(names)]
    return sorted((each.start / 1e3 + origin, each.end / 1e3 + origin) for each in ranges)


def steps_of(events, origin, first):
    """Return {part: [(start, end), ...]} for each step, whose first part has this name.

    A bucket is ready when its last gradient is; DDP then hands it to gloo. The time between the
    last function of backward and the optimizer is spent waiting.
    """
    functions = spans(events, origin, "autograd::engine::evaluate_function")
    handed_over = spans(events, origin, "c10d::allreduce_")
    reduced = spans(events, origin, "gloo:all_reduce")
    updates = spans(events, origin, "Optimizer.step")
    steps = []
    for data, update in zip(spans(events, origin, first), updates):
        start, end = data[1], update[0]
        inside = [span for span in functions if start <= span[0] < end]
        backward = inside[0][0], max(after for _, after in inside)
        step = {"data": [data], "forward": [(start, backward[0])], "backward": [backward]}
        step |= {"waiting": [(backward[1], end)], "optimizer": [update]}
        step["ready"] = [(at, at) for at, _ in handed_over if start <= at < end]
        step["all-reduce"] = [(at, min(after, end)) for at, after in reduced if start <= at < end]
        steps.append(step)
    return steps


def counted_from(origin, step):
    """Return a step with all its times counted from a moment."""
    return {
        name: [[round(at - origin, 3) for at in span] for span in part]
        for name, part in step.items()
    }


def fastest_step(by_rank):
    """Return the shortest step, which others disturb least, from when its first rank began."""
    whole = []
    for step in zip(*by_rank, strict=True):
        origin = min(rank["data"][0][0] for rank in step)
        whole.append((max(rank["optimizer"][0][1] for rank in step) - origin, origin, step))
    _, origin, step = min(whole, key=lambda one: one[0])
    return [counted_from(origin, rank) for rank in step]


def durations(step):
    """Return the milliseconds of each part of a step, and how much of the all-reduce is hidden."""
    found = {name: sum(end - start for start, end in step[name]) for name in PARTS}
    whole = sum(found.values())
    ((_, ready),) = step["backward"]
    found["all-reduce"] = sum(end - start for start, end in step["all-reduce"])
    found["hidden"] = sum(max(0, min(end, ready) - start) for start, end in step["all-reduce"])
    return {**found, "step": whole}


def means(steps):
    """Return the mean milliseconds of each part over all steps."""
    rows = [durations(step) for step in steps]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def report(record):
    """Return a Markdown table of the mean milliseconds of each rank."""
    rows = record["milliseconds_by_rank"]
    lines = [(f"rank {n}", *(f"{ms:.1f}" for ms in row.values())) for n, row in enumerate(rows)]
    return shared.table(("ms per step", *rows[0]), *lines)


def main():
    if torch.cuda.is_available():
        raise SystemExit("breakdown.py times the CPU: type `export CUDA_VISIBLE_DEVICES=` first")
    more = {"bucket_mb": (0.0, "DDP's bucket_cap_mb; 0: its default"), "figure": ("", "a file")}
    sizes = {name: shared.TRAINING[name] for name in ("batch_size", "width")}
    args = shared.options(__doc__, **sizes, **more)
    shared.load("05").ddp_setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler, trainer, _ = profiled(args, 40)
    origin = profiler.profiler.kineto_results.trace_start_ns() / 1e6
    steps = steps_of(profiler.events(), origin, "enumerate(DataLoader)")
    by_rank = [None] * world_size
    dist.all_gather_object(by_rank, (means(steps), steps))
    rows, steps_by_rank = zip(*by_rank)
    sizes = trainer.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    found = {"world_size": world_size, "bucket_bytes": [int(size) for size in sizes.split(",")]}
    if args.figure:
        times = [round(profiled(args, 10, **step)[2], 3) for step in PREDICTED]
        taken = zip(PREDICTED, times, strict=True)
        found["measured"] = [{"slower": 1, **step, "milliseconds": ms} for step, ms in taken]
        found["ranks"] = fastest_step(steps_by_rank)
    if rank == 0:
        record = shared.write("breakdown", args, report, milliseconds_by_rank=rows, **found)
        if args.figure:
            data = json.loads(Path(args.figure).read_text(encoding="utf-8"))
            data["records"][str(world_size)] = record
            text = json.dumps(data, separators=(",", ":"))
            Path(args.figure).write_text(f"{text}\n", encoding="utf-8")
    dist.barrier()
    del trainer  # and with it DDP, before its process group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
