"""Measure where a training step's time goes: its parts, each bucket's all-reduce, the waiting.

    torchrun --standalone --nproc-per-node=2 benchmarks/breakdown.py

It runs steps of 05_gather_eval.py under torch.profiler, prints the mean milliseconds of each part,
draws the fastest step as breakdown.svg, and writes breakdown.json and trace-RANK.json (open the
traces at ui.perfetto.dev). The times are those of the host. A GPU runs asynchronously, so look at
its trace.

The default model fits into one of DDP's 25 MB buckets. To see several, take a wider model with
smaller buckets: --width=128 --batch-size=8 --bucket-mb=0.25. Then the files are timeline-N.json and
timeline-N.svg, where N is the number of ranks, and some of what the figure on diffs/index.html
forecasts is measured, too.
"""

import statistics
from contextlib import nullcontext

import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from shared import (
    BUSY,
    GREY,
    drawing,
    load,
    needs_torchrun,
    parser_of,
    positive,
    positive_int,
    prepared,
    table,
    write,
)
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "data": "#2da44e",
    "forward": "#2f81f7",
    "backward": "#8250df",
    "waiting": "#cf222e",
    "optimizer": "#bf8700",
}
WARM_UP, STEPS, FEW = 5, 40, 10
FORECAST = ((4, 1, True), (1, 4, True), (1, 4, False))  # batch, passes and no_sync
DDP = "self.model = DDP(model"

# ---------------------------------------------------------------- the recording


def profiled(args, steps, batch=1, passes=1, no_sync=True):
    """Return a profiler that has seen some steps, and the Trainer that took them."""
    words = [f"--batch-size={batch * args.batch_size}", f"--width={args.width}"]
    words.append("--checkpoint-path=.breakdown.pt")
    trainer = prepared("05", words, [(DDP, f"{DDP}, bucket_cap_mb={args.bucket_mb}")])
    run(trainer, WARM_UP, passes, no_sync)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds) as profiler:
        run(trainer, steps, passes, no_sync)
    return profiler, trainer


def run(trainer, steps, passes, no_sync):
    """Take some steps, each after so many passes forward and backward."""
    batches = iter(trainer.train_loader)
    for _ in range(steps):
        if passes == 1:
            trainer._run_batch(*next(batches))
            continue
        trainer.optimizer.zero_grad()
        for last in [*[False] * (passes - 1), True]:
            source, targets = (tensor.to(trainer.device) for tensor in next(batches))
            with nullcontext() if last or not no_sync else trainer.model.no_sync():
                torch.nn.functional.cross_entropy(trainer.model(source), targets).backward()
        trainer.optimizer.step()


def spans(events, *names):
    """Return (start, end) in milliseconds, sorted, of the events whose names begin like that."""
    ranges = [event.time_range for event in events if event.name.startswith(names)]
    return sorted((each.start / 1e3, each.end / 1e3) for each in ranges)


def steps_of(events, origin):
    """Return for each step {part: [(start, end), ...]}, in milliseconds of the machine's clock.

    A bucket is ready when its last gradient is; DDP then hands it to the backend. What is between
    the last function of backward and the optimizer is spent waiting.
    """
    fetched = spans(events, "enumerate(DataLoader)")
    ahead = spans(events, "DistributedDataParallel.forward")
    functions = spans(events, "autograd::engine::evaluate_function")
    handed_over = spans(events, "c10d::allreduce_")
    reduced = spans(events, "gloo:all_reduce", "nccl:all_reduce")
    steps = []
    for data, forward, update in zip(fetched, ahead, spans(events, "Optimizer.step")):
        inside = [span for span in functions if forward[1] <= span[0] < update[0]]
        backward = inside[0][0], max(end for _, end in inside)
        sums = [span for span in reduced if forward[1] <= span[0] < update[0]]
        step = {
            "data": [data],
            "forward": [forward],
            "backward": [backward],
            "waiting": [(backward[1], update[0])],
            "optimizer": [update],
            "ready": [(at, at) for at, _ in handed_over if forward[1] <= at < update[0]],
            "all-reduce": [(start, min(end, update[0])) for start, end in sums],  # ends late
        }
        steps.append({name: shifted(found, origin) for name, found in step.items()})
    return steps


def shifted(spans, offset):
    return [(round(start + offset, 3), round(end + offset, 3)) for start, end in spans]


def fastest_step(by_rank):
    """Return the shortest step, of all ranks, from the moment that its first rank began.

    Other programs disturb it least.
    """
    steps = list(zip(*by_rank, strict=True))
    begins = [min(rank["data"][0][0] for rank in step) for step in steps]
    ends = [max(rank["optimizer"][0][1] for rank in step) for step in steps]
    chosen = min(range(len(steps)), key=lambda n: ends[n] - begins[n])
    return [
        {name: shifted(found, -begins[chosen]) for name, found in rank.items()}
        for rank in steps[chosen]
    ]


def durations(step):
    """Return the milliseconds of each part of a step, and how much of the all-reduce is hidden."""
    found = {name: sum(end - start for start, end in step[name]) for name in step}
    whole = step["optimizer"][0][1] - step["data"][0][0]
    found["other"] = whole - sum(found[name] for name in PARTS)
    ((_, ready),) = step["backward"]
    found["hidden"] = sum(max(0, min(end, ready) - start) for start, end in step["all-reduce"])
    return found


def means(steps):
    """Return the mean milliseconds of each part over all steps."""
    rows = [durations(step) for step in steps]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def shortest(events):
    """Return the fewest milliseconds from a step's first batch to the end of its optimizer."""
    ends = [end for _, end in spans(events, "Optimizer.step")]
    starts = [start for start, _ in spans(events, "enumerate(DataLoader)")]
    firsts = [min(start for start in starts if start > end) for end in [0, *ends[:-1]]]
    return min(end - first for first, end in zip(firsts, ends))


def measured(args):
    """Measure what the figure forecasts: return the settings, each with its milliseconds."""
    found = []
    for batch, passes, no_sync in FORECAST:
        profiler, _ = profiled(args, FEW, batch, passes, no_sync)
        settings = {"slower": 1, "batch": batch, "passes": passes, "no_sync": no_sync}
        found.append({**settings, "milliseconds": round(shortest(profiler.events()), 3)})
    return found


# ---------------------------------------------------------------- showing


def report(record):
    """Return a Markdown table of the mean milliseconds of each rank."""
    names = [*PARTS, "other", "all-reduce", "hidden"]
    lines = [("ms per step", *names, "step")]
    for rank, row in enumerate(record["milliseconds_by_rank"]):
        total = sum(row[name] for name in [*PARTS, "other"])
        lines.append((f"rank {rank}", *(f"{row[name]:.1f}" for name in names), f"{total:.1f}"))
    return table(*lines)


def draw(ranks, path):
    """Draw a step of each rank: its parts, below them the all-reduce of each bucket."""
    with drawing(path, "One training step", figsize=(9, 0.9 + 0.9 * len(ranks))) as axis:
        for number, rank in enumerate(ranks):
            for name, colour in PARTS.items():
                for start, end in rank[name]:
                    axis.barh(2 * number, end - start, 0.7, left=start, color=colour)
            for bucket, (start, end) in enumerate(rank["all-reduce"], 1):
                y = 2 * number + (0.58 if bucket % 2 else 0.94)  # gloo sends two at a time
                axis.barh(y, end - start, 0.3, left=start, color=GREY)
            ready = [start for start, _ in rank["ready"]]
            axis.plot(ready, [2 * number - 0.5] * len(ready), "o", color=GREY, markersize=4)
        handles = [Patch(color=colour, label=name) for name, colour in PARTS.items()]
        handles.append(Patch(color=GREY, label="all-reduce of a bucket"))
        axis.figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
        axis.set(xlabel="milliseconds", yticks=[2 * number for number in range(len(ranks))])
        axis.set_yticklabels([f"rank {number}" for number in range(len(ranks))])
        axis.invert_yaxis()


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=positive_int, default=128, help="per process")
    parser.add_argument("--width", type=positive_int, default=32, help="of the model; 256 for GPUs")
    parser.add_argument("--bucket-mb", type=positive, help="DDP's bucket_cap_mb")
    args = parser.parse_args()
    needs_torchrun(parser)
    return args


def main():
    args = parse_args()
    load("05").ddp_setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler, trainer = profiled(args, STEPS)
    profiler.export_chrome_trace(f"trace-{rank}.json")
    origin = profiler.profiler.kineto_results.trace_start_ns() / 1e6
    by_rank = [None] * world_size if rank == 0 else None
    dist.gather_object(steps_of(profiler.events(), origin), by_rank)
    sizes = trainer.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    found = {"world_size": world_size, "bucket_bytes": [int(size) for size in sizes.split(",")]}
    name = "breakdown"
    if args.bucket_mb:
        name = f"timeline-{world_size}"
        found |= {"measured": measured(args), "load_average": BUSY}
    if rank == 0:
        rows, ranks = [means(steps) for steps in by_rank], fastest_step(by_rank)
        write(name, args, report, **found, milliseconds_by_rank=rows, ranks=ranks)
        draw(ranks, f"{name}.svg")
    dist.barrier()
    del trainer  # and DDP, before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
