"""Measure where a training step's time goes: its parts, each bucket's all-reduce, the waiting.

    torchrun --standalone --nproc-per-node=2 benchmarks/breakdown.py

It runs steps of 05_gather_eval.py under torch.profiler, prints the mean milliseconds of each part,
draws the fastest step as breakdown.svg, and writes breakdown.json and trace-RANK.json (open the
traces at ui.perfetto.dev).

The default model fits into one of DDP's 25 MB buckets. To see several, take a wider model with
smaller buckets: --width=128 --batch-size=8 --bucket-mb=0.25. Then the files are timeline-RANKS.*,
and some of what the figure on diffs/index.html forecasts is measured, too.

With GPUs, the parts are how long the host takes to launch them, and nothing is drawn or forecast.
Beside them is how long a GPU computes and copies, and how long NCCL's kernels run, with their
waiting. This was never held against a GPU's trace: compare it with yours.
"""

import statistics
import sys
import time
from contextlib import nullcontext

import shared
import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "data": "#2da44e",
    "forward": "#2f81f7",
    "backward": "#8250df",
    "waiting": "#cf222e",
    "optimizer": "#bf8700",
}
FORECAST = ((4, 1, True), (1, 4, True), (1, 4, False))  # batch, passes and no_sync
DDP = "self.model = DDP(model"
TRAIN = "    trainer.train(args.total_epochs, args.save_every)\n"

# ---------------------------------------------------------------- the recording


def profiled(args, steps, batch=1, passes=1, no_sync=True):
    """Take some steps; return the profiler, the Trainer, and the shortest step in milliseconds."""
    changes = [(DDP, f"{DDP}, bucket_cap_mb={args.bucket_mb or None}")]
    script = shared.load("05", [*changes, (TRAIN, f"    return trainer\n{TRAIN}")])
    words = [f"--batch-size={batch * args.batch_size}", f"--width={args.width}"]
    sys.argv[1:] = [*words, "--checkpoint-path=.breakdown.pt"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = script.train_and_evaluate(device, script.parse_args())
    run(trainer, 5, passes, no_sync)  # a warm-up
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds) as profiler:
        shortest = run(trainer, steps, passes, no_sync)
    return profiler, trainer, shortest


def run(trainer, steps, passes, no_sync):
    """Take some steps, each after so many passes forward and backward; time the shortest."""
    batches, times = iter(trainer.train_loader), []
    for _ in range(steps):
        start = time.perf_counter()
        if passes == 1:
            trainer._run_batch(*next(batches))
        else:
            trainer.optimizer.zero_grad()
            for left in reversed(range(passes)):
                source, targets = (tensor.to(trainer.device) for tensor in next(batches))
                with trainer.model.no_sync() if left and no_sync else nullcontext():
                    torch.nn.functional.cross_entropy(trainer.model(source), targets).backward()
            trainer.optimizer.step()
        torch.get_device_module(trainer.device).synchronize()  # a GPU may be behind the host
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def spans(events, origin, *names):
    """Return (start, end) of the host's ranges of these names, in ms of the machine's clock."""
    host = [event for event in events if event.device_type == DeviceType.CPU]  # a GPU repeats them
    ranges = [event.time_range for event in host if event.name.startswith(names)]
    return sorted((each.start / 1e3 + origin, each.end / 1e3 + origin) for each in ranges)


def of_gpu(events, steps):
    """Return the mean milliseconds of a step that a GPU computes, and NCCL runs; {} without one."""
    found = {"GPU": 0, "NCCL": 0}
    for event in events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            name = "NCCL" if event.name.startswith("nccl") else "GPU"
            found[name] += event.time_range.elapsed_us() / 1e3 / steps
    return found if any(found.values()) else {}


def steps_of(events, origin):
    """Return {part: [(start, end), ...]} for each step.

    A bucket is ready when its last gradient is; DDP then hands it to the backend. What is between
    the last function of backward and the optimizer is spent waiting.
    """
    fetched = spans(events, origin, "enumerate(DataLoader)")
    ahead = spans(events, origin, "DistributedDataParallel.forward")
    functions = spans(events, origin, "autograd::engine::evaluate_function")
    handed_over = spans(events, origin, "c10d::allreduce_")
    reduced = spans(events, origin, "gloo:all_reduce", "nccl:all_reduce")
    updates = spans(events, origin, "Optimizer.step")
    steps = []
    for data, forward, update in zip(fetched, ahead, updates):
        start, end = forward[1], update[0]
        inside = [span for span in functions if start <= span[0] < end]
        backward = inside[0][0], max(after for _, after in inside)
        sums = [(at, min(after, end)) for at, after in reduced if start <= at < end]  # ends late
        steps.append(
            {
                "data": [data],
                "forward": [forward],
                "backward": [backward],
                "waiting": [(backward[1], end)],
                "optimizer": [update],
                "ready": [(at, at) for at, _ in handed_over if start <= at < end],
                "all-reduce": sums,
            }
        )
    return steps


def fastest_step(by_rank):
    """Return the shortest step, which others disturb least, from when its first rank began."""

    whole = []
    for step in zip(*by_rank, strict=True):
        origin = min(rank["data"][0][0] for rank in step)
        whole.append((max(rank["optimizer"][0][1] for rank in step) - origin, origin, step))
    _, origin, step = min(whole, key=lambda one: one[0])
    return [
        {name: [[round(at - origin, 3) for at in span] for span in rank[name]] for name in rank}
        for rank in step
    ]


def durations(step, parts=PARTS):
    """Return the milliseconds of each part of a step, and how much of the all-reduce is hidden."""
    found = {name: sum(end - start for start, end in step[name]) for name in parts}
    whole = step["optimizer"][0][1] - step["data"][0][0]
    found["other"] = whole - sum(found.values())
    if "waiting" in parts:
        sums, ((_, ready),) = step["all-reduce"], step["backward"]
        found["all-reduce"] = sum(end - start for start, end in sums)
        found["hidden"] = sum(max(0, min(end, ready) - start) for start, end in sums)
    return {**found, "step": whole}


def means(steps, gpu):
    """Return the mean milliseconds of each part over all steps. No host waits for a GPU's sums."""
    parts = [name for name in PARTS if name != "waiting" or not gpu]
    rows = [durations(step, parts) for step in steps]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]} | gpu


def measured(args):
    """Measure what the figure forecasts: return the settings, each with its milliseconds."""
    found = []
    for batch, passes, no_sync in FORECAST:
        *_, shortest = profiled(args, 10, batch, passes, no_sync)
        settings = {"slower": 1, "batch": batch, "passes": passes, "no_sync": no_sync}
        found.append({**settings, "milliseconds": round(shortest, 3)})
    return found


# ---------------------------------------------------------------- showing


def report(record):
    """Return a Markdown table of the mean milliseconds of each rank."""
    rows = record["milliseconds_by_rank"]
    lines = [(f"rank {n}", *(f"{ms:.1f}" for ms in row.values())) for n, row in enumerate(rows)]
    return shared.table(("ms per step", *rows[0]), *lines)


def draw(ranks, path):
    """Draw a step of each rank: its parts, below them the all-reduce of each bucket."""
    with shared.drawing(path, "One training step", figsize=(9, 0.9 + 0.9 * len(ranks))) as axis:
        for number, rank in enumerate(ranks):
            for name, colour in PARTS.items():
                for start, end in rank[name]:
                    axis.barh(2 * number, end - start, 0.7, left=start, color=colour)
            for bucket, (start, end) in enumerate(rank["all-reduce"], 1):
                y = 2 * number + (0.58 if bucket % 2 else 0.94)  # gloo sends two at a time
                axis.barh(y, end - start, 0.3, left=start, color=shared.GREY)
            ready = [start for start, _ in rank["ready"]]
            axis.plot(ready, [2 * number - 0.5] * len(ready), "o", color=shared.GREY, markersize=4)
        handles = [Patch(color=colour, label=name) for name, colour in PARTS.items()]
        handles.append(Patch(color=shared.GREY, label="all-reduce of a bucket"))
        axis.figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
        axis.set(xlabel="milliseconds", yticks=[2 * number for number in range(len(ranks))])
        axis.set_yticklabels([f"rank {number}" for number in range(len(ranks))])
        axis.invert_yaxis()


def main():
    sizes = {name: shared.TRAINING[name] for name in ("batch_size", "width")}
    args = shared.options(__doc__, **sizes, bucket_mb=(0.0, "DDP's bucket_cap_mb; 0: its default"))
    shared.load("05").ddp_setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler, trainer, _ = profiled(args, 40)
    profiler.export_chrome_trace(f"trace-{rank}.json")
    origin = profiler.profiler.kineto_results.trace_start_ns() / 1e6
    events, by_rank = profiler.events(), [None] * world_size if rank == 0 else None
    steps, gpu = steps_of(events, origin), of_gpu(events, 40)
    dist.gather_object((means(steps, gpu), steps), by_rank)
    sizes = trainer.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    found = {"world_size": world_size, "bucket_bytes": [int(size) for size in sizes.split(",")]}
    name = "breakdown"
    if args.bucket_mb and not gpu:
        name = f"timeline-{world_size}"
        found["measured"] = measured(args)
    if rank == 0:
        rows, steps_by_rank = zip(*by_rank)
        found["ranks"] = [] if gpu else fastest_step(steps_by_rank)
        shared.write(name, args, report, milliseconds_by_rank=rows, **found)
        if gpu:
            print(__doc__.rpartition("\n\n")[2])
        else:
            draw(found["ranks"], f"{name}.svg")
    dist.barrier()
    del trainer  # and DDP, before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
