"""Measure DDP by hand, of three recipes, beside DDP: all-reduces, speed, and one step in detail.

    torchrun --standalone --nproc-per-node=2 benchmarks/by_hand.py

All four train a model that is four times wider than step 3's in one process group, in turn. It
writes by_hand-RANKS.json, from which diffs/generate.py draws the step.
"""

import math
import statistics
import sys
import time

import shared
import torch
import torch.distributed as dist
from breakdown import spans
from torch.profiler import ProfilerActivity, profile, record_function

WAYS = {
    "after_backward": "after backward",
    "during_backward": "while backward runs",
    "in_buckets": "in buckets",
    "03": "DDP",
}


def trainer(name, width, batch_size, device):
    """Return the Trainer of a recipe or of step 3."""
    script = shared.load(name)
    sys.argv[1:] = [f"--batch-size={batch_size}", "--checkpoint-path=.by_hand.pt"]
    args = script.parse_args()
    torch.manual_seed(0)
    model = script.build_model(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    train_set, _ = script.load_datasets()
    loader = script.prepare_dataloader(train_set, args)
    return script.Trainer(model, loader, optimizer, device, args)


def speed(trainer, steps):
    """Take steps; return how many fit into a second."""
    batch = next(iter(trainer.train_loader))  # always the same
    start = time.perf_counter()
    for _ in range(steps):
        with record_function("step"):
            trainer._run_batch(*batch)
    torch.get_device_module(trainer.device).synchronize()
    return steps / (time.perf_counter() - start)


def steps_of(events):
    """Return {part: [(start, end), ...]} of each step, in milliseconds from its start."""
    functions = spans(events, 0, "autograd::engine::evaluate_function")
    sums = spans(events, 0, "gloo:all_reduce")
    updates = spans(events, 0, "Optimizer.step")
    found = []
    for (start, _), update in zip(spans(events, 0, "step"), updates, strict=True):
        inside = [span for span in functions if start <= span[0] < update[0]]
        backward = inside[0][0], max(end for _, end in inside)
        parts = {
            "forward": [(start, backward[0])],
            "backward": [backward],
            "waiting": [(backward[1], update[0])],
            "optimizer": [update],
            "all-reduce": [span for span in sums if start <= span[0] < update[1]],
        }
        found.append(
            {
                name: [[round(at - start, 3) for at in span] for span in part]
                for name, part in parts.items()
            }
        )
    return found


def examined(trainer, count):
    """Return what an average step all-reduces and when it starts with it, and the fastest step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        speed(trainer, count)
    events = profiler.events()
    steps = steps_of(events)
    sent = [each.input_shapes[0] for each in events if each.name.startswith("gloo:all_reduce")]
    starts = []
    for step in steps:
        ((begin, end),) = step["backward"]
        starts.append((step["all-reduce"][0][0] - begin) / (end - begin))
    numbers = {
        "all_reduces": len(sent) / count,
        "bytes": 4 * sum(map(math.prod, sent)) / count,
        "first_starts": round(statistics.median(starts), 3),  # 0: as backward begins; 1: as it ends
    }
    return numbers, min(steps, key=lambda step: step["optimizer"][0][1])


def report(record):
    """Return what was found as a Markdown table."""
    heading = ("averaged", "all-reduces", "bytes", "first starts", "speed")
    rows = []
    for way, row in record["ways"].items():
        counts = (f"{row['all_reduces']:g}", f"{row['bytes']:,.0f}")
        rows.append((way, *counts, f"{row['first_starts']:.2f}", shared.cell(row["speed"])))
    return shared.table(heading, *rows)


def main():
    sizes = {"width": (128, "of the model"), "batch_size": (8, "per process")}
    counts = {"rounds": (15, "in which all take their turn"), "steps": (10, "in a turn")}
    args = shared.options(__doc__, **sizes, **counts, profiled=(30, "steps"))
    shared.load("03").ddp_setup()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = args.width, args.batch_size, device
    trainers = {way: trainer(name, *size) for name, way in WAYS.items()}
    for each in trainers.values():
        speed(each, 5)  # a warm-up
    found, order = {way: [] for way in trainers}, [*trainers]
    for _ in range(args.rounds):
        for way in order:
            found[way].append(speed(trainers[way], args.steps))
        order.append(order.pop(0))
    measured, drawn = {}, {}
    for way, each in trainers.items():
        numbers, drawn[way] = examined(each, args.profiled)
        measured[way] = {**numbers, "speed": shared.relative(found[way], found["DDP"])}
    if dist.get_rank() == 0:
        name = f"by_hand-{dist.get_world_size()}"
        shared.write(name, args, report, ways=measured, drawn=drawn)
    dist.barrier()
    del trainers, each  # and DDP, before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
