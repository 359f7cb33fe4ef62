"""Measure DDP written by hand, as in three recipes, beside DDP: all-reduces, speed, one step.

    torchrun --standalone --nproc-per-node=2 more/benchmarks/by_hand.py

All four train a model that is four times wider than step 3's, in turn and in one process group. The
results go to by_hand.json; more/benchmarks/figures/by_hand-2.json is such a file, and
diffs/generate.py draws its steps.
"""

import math
import statistics
import sys
import time

import shared
import torch
import torch.distributed as dist
from breakdown import counted_from, steps_of
from torch.profiler import ProfilerActivity, profile, record_function

WAYS = {
    "after_backward": "after backward",
    "during_backward": "while backward runs",
    "in_buckets": "in buckets",
    "03": "DDP",
}


def trainer_of(name, own, device):
    """Return the Trainer of a recipe or of step 3."""
    script = shared.load(name)
    sys.argv[1:] = [f"--batch-size={own.batch_size}", "--checkpoint-path=.by_hand.pt"]
    args = script.parse_args()
    torch.manual_seed(0)
    model = script.build_model(own.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    train_set, _ = script.load_datasets()
    loader = script.prepare_dataloader(train_set, args)
    return script.Trainer(model, loader, optimizer, device, args)


def speed(trainer, steps):
    """Take steps; return the number of steps per second."""
    batch = next(iter(trainer.train_loader))  # always the same
    start = time.perf_counter()
    for _ in range(steps):
        with record_function("step"):  # marks its beginning
            pass
        trainer._run_batch(*batch)
    torch.get_device_module(trainer.device).synchronize()
    return steps / (time.perf_counter() - start)


def profiled(trainer, count):
    """Return what an average step all-reduces, when it begins to, and the fastest step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        speed(trainer, count)
    events = profiler.events()
    steps = [counted_from(step["data"][0][0], step) for step in steps_of(events, 0, "step")]
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
    """Return the results as a Markdown table."""
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
    trainers = {way: trainer_of(name, args, device) for name, way in WAYS.items()}
    for trainer in trainers.values():
        speed(trainer, 5)  # a warm-up
    found, order = {way: [] for way in trainers}, [*trainers]
    for _ in range(args.rounds):
        for way in order:
            found[way].append(speed(trainers[way], args.steps))
        order.append(order.pop(0))
    measured, drawn = {}, {}
    for way, trainer in trainers.items():
        numbers, drawn[way] = profiled(trainer, args.profiled)
        measured[way] = {**numbers, "speed": shared.relative(found[way], found["DDP"])}
    if dist.get_rank() == 0:
        shared.write("by_hand", args, report, ways=measured, drawn=drawn)
    dist.barrier()
    del trainers, trainer  # and with them DDP, before its process group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
