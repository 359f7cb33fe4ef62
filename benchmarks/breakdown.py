"""Measure how long each part of a training step takes on every rank, and how long the rank waits.

    torchrun --standalone --nproc-per-node=2 benchmarks/breakdown.py

It runs steps of 04_multinode.py under torch.profiler, prints the mean milliseconds of each part,
draws one step as breakdown.svg, and writes breakdown.json and trace-RANK.json (open the traces at
ui.perfetto.dev). The times are those of the host. A GPU runs asynchronously, so look at its trace.
"""

import os
import statistics

import torch
import torch.distributed as dist
import torch.distributed.nn
from matplotlib.patches import Patch
from shared import GREY, drawing, load, parser_of, positive_int, prepared, table, write
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "data": "#2da44e",
    "forward": "#2f81f7",
    "backward": "#8250df",
    "waiting": "#cf222e",
    "optimizer": "#bf8700",
    "other": "#8c959f",
}
WARM_UP, STEPS = 10, 40


def profiled_steps(words):
    """Train a few steps, then profile more; return the profiler and the size of the gradients."""
    trainer = prepared("04", words).trainer
    batches, count = iter(trainer.train_loader), len(trainer.train_loader)
    if count < WARM_UP + STEPS:
        raise SystemExit(f"an epoch has {count} steps, fewer than the {WARM_UP + STEPS} needed")
    for _ in range(WARM_UP):
        trainer._run_batch(*next(batches))
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds) as profiler:
        for _ in range(STEPS):
            trainer._run_batch(*next(batches))
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in trainer.model.parameters())
    return profiler, gradients


def spans(events, start):
    """Return (start, end) in milliseconds, sorted, of the events whose names begin with `start`."""
    found = [
        (e.time_range.start / 1e3, e.time_range.end / 1e3)
        for e in events
        if e.name.startswith(start)
    ]
    return sorted(found)


def timelines(profiler):
    """Return for each step {part: [(start, end), ...]}, in milliseconds from its start.

    The profiler records data fetching, DDP's forward, each function of backward, and the optimizer.
    The time between the last function of backward and the optimizer is spent waiting for the
    all-reduce that DDP started during backward.
    """
    events = profiler.events()
    fetched = spans(events, "enumerate(DataLoader)")
    forward = spans(events, "DistributedDataParallel.forward")
    backward = spans(events, "autograd::engine::evaluate_function")
    reduced = spans(events, "gloo:all_reduce") or spans(events, "nccl:all_reduce")
    steps = []
    for data, ahead, update in zip(fetched, forward, spans(events, "Optimizer.step"), strict=True):
        functions = [span for span in backward if ahead[1] <= span[0] < update[0]]
        back = functions[0][0], max(end for _, end in functions)
        sums = [span for span in reduced if back[0] <= span[0] < update[0]]
        parts = {
            "data": [data],
            "forward": [ahead],
            "backward": [back],
            "waiting": [(back[1], update[0])],
            "optimizer": [update],
            "all-reduce": [(start, min(end, update[0])) for start, end in sums],  # ends late
        }
        steps.append({name: shifted(found, data[0]) for name, found in parts.items()})
    return steps


def shifted(spans, origin):
    return [(start - origin, end - origin) for start, end in spans]


def durations(step):
    """Return the milliseconds of each part of a step, and how much of the all-reduce is hidden."""
    found = {name: sum(end - start for start, end in step[name]) for name in step}
    found["other"] = length(step) - sum(found[name] for name in PARTS if name in found)
    ((_, ready),) = step["backward"]
    found["hidden"] = sum(max(0, min(end, ready) - start) for start, end in step["all-reduce"])
    return found


def length(step):
    """Return a step's milliseconds, to the end of the optimizer."""
    return step["optimizer"][-1][1]


def means(steps):
    """Return the mean milliseconds of each part over all steps."""
    rows = [durations(step) for step in steps]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def draw(steps, path):
    """Draw one step of each rank: its parts, and below them the all-reduce."""
    colours = PARTS | {"all-reduce": GREY}
    with drawing(path, "One training step", figsize=(9, 0.9 + 0.8 * len(steps))) as axis:
        for rank, step in enumerate(steps):
            for name, found in step.items():
                y, height = (2 * rank + 0.8, 0.5) if name == "all-reduce" else (2 * rank, 0.8)
                for start, end in found:
                    axis.barh(y, end - start, height, left=start, color=colours[name])
        handles = [Patch(color=colours[name], label=name) for name in steps[0]]
        axis.figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
        axis.set(xlabel="milliseconds", yticks=[2 * rank for rank in range(len(steps))])
        axis.set_yticklabels([f"rank {rank}" for rank in range(len(steps))])
        axis.invert_yaxis()


def report(rows):
    """Return a Markdown table of the mean milliseconds of each rank."""
    names = [*PARTS, "all-reduce", "hidden"]
    lines = [("ms per step", *names, "step")]
    for rank, row in enumerate(rows):
        total = sum(row[name] for name in PARTS)
        lines.append((f"rank {rank}", *(f"{row[name]:.1f}" for name in names), f"{total:.1f}"))
    return table(*lines)


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=positive_int, default=128, help="per process")
    parser.add_argument("--width", type=positive_int, default=32, help="of the model; 256 for GPUs")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node=2 breakdown.py")
    return args


def main():
    args = parse_args()
    load("04").ddp_setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    words = [f"--batch-size={args.batch_size}", f"--width={args.width}"]
    profiler, gradients = profiled_steps([*words, "--checkpoint-path=.breakdown.pt"])
    profiler.export_chrome_trace(f"trace-{rank}.json")
    steps = timelines(profiler)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(steps, gathered)
    if rank == 0:
        rows = [means(steps) for steps in gathered]
        print(report(rows))
        write("breakdown", args, gradient_bytes=gradients, milliseconds_by_rank=rows)
        typical = sorted(range(STEPS), key=lambda n: length(steps[n]))[STEPS // 2]
        draw([steps[typical] for steps in gathered], "breakdown.svg")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
