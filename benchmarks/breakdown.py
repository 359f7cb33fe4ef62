"""Where a training step goes, on every rank: data, forward, backward, waiting, optimizer.

    torchrun --standalone --nproc-per-node=2 benchmarks/breakdown.py [arguments of 04_multinode.py]

It runs steps of the real 04_multinode.py under torch.profiler, prints the mean milliseconds of each
part, draws one step as breakdown.svg, and writes trace-RANK.json, to be opened at ui.perfetto.dev.
The times are those of the host: on a GPU, which works behind its back, look at the trace instead.
"""

import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from shared import GREY, drawing, machine
from torch.profiler import ProfilerActivity, profile

SCRIPT = Path(__file__).resolve().parent.parent / "04_multinode.py"
PARTS = {
    "data": "#2da44e",
    "forward": "#2f81f7",
    "backward": "#8250df",
    "waiting": "#cf222e",
    "optimizer": "#bf8700",
    "other": "#8c959f",
}
WARM_UP, STEPS = 20, 50


def load_script():
    """Import 04_multinode.py, whose name is none that Python could import."""
    spec = importlib.util.spec_from_file_location("multinode", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def profiled_steps(script, args, rank):
    """Train some steps, and profile more; return the profiler and the gradients' bytes."""
    train_set, _, model, optimizer = script.load_train_objs(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = script.prepare_dataloader(train_set, args)
    trainer = script.Trainer(model, data, optimizer, device, rank, args)
    batches = iter(data)

    def step():
        source, targets = next(batches)
        trainer._run_batch(source.to(device), targets.to(device))

    if len(data) < WARM_UP + STEPS:
        script.parser.error(
            f"an epoch has {len(data)} steps, fewer than the {WARM_UP + STEPS} here"
        )
    for _ in range(WARM_UP):
        step()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds) as profiler:
        for _ in range(STEPS):
            step()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())
    return profiler, gradients


def spans(events, start):
    """Return (start, end) in milliseconds of all events whose name begins so, in order."""
    found = [
        (e.time_range.start / 1e3, e.time_range.end / 1e3)
        for e in events
        if e.name.startswith(start)
    ]
    return sorted(found)


def timelines(profiler):
    """Return for each step {part: [(start, end), ...]}, in milliseconds from its beginning.

    The profiler marks fetching, DDP's forward, each function of backward and the optimizer by
    itself. What lies between the last function of backward and the optimizer is waiting, for the
    all-reduce that DDP started from within backward.
    """
    events = profiler.events()
    fetched = spans(events, "enumerate(DataLoader)")
    forward = spans(events, "DistributedDataParallel.forward")
    backward = spans(events, "autograd::engine::evaluate_function")
    reduced = spans(events, "gloo:all_reduce") or spans(events, "nccl:all_reduce")
    steps = []
    for data, ahead, update in zip(fetched, forward, spans(events, "Optimizer.step"), strict=True):
        own = [span for span in backward if ahead[1] <= span[0] < update[0]]
        back = own[0][0], max(end for _, end in own)
        parts = {"data": [data], "forward": [ahead], "backward": [back]}
        parts |= {"waiting": [(back[1], update[0])], "optimizer": [update]}
        own = [span for span in reduced if back[0] <= span[0] < update[0]]
        parts["all-reduce"] = [(start, min(end, update[0])) for start, end in own]  # marked late
        moved = {k: [(a - data[0], b - data[0]) for a, b in found] for k, found in parts.items()}
        steps.append(moved)
    return steps


def durations(step):
    """Return the milliseconds of each part of a step, and of all-reduce as far as it is hidden."""
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
    """Draw a step of each rank: its parts, and below them the all-reduce that runs beside them."""
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
    """Print a Markdown table of the mean milliseconds of each rank."""
    names = [*PARTS, "all-reduce", "hidden"]
    print(f"| ms per step | {' | '.join(names)} | step |")
    print("|---" * (len(names) + 2) + "|")
    for rank, mean in enumerate(rows):
        total = sum(mean[name] for name in PARTS)
        cells = [f"{mean[name]:.3f}" for name in names] + [f"{total:.3f}"]
        print(f"| rank {rank} | {' | '.join(cells)} |")


def main():
    script = load_script()
    script.parser.prog, script.parser.description = "breakdown.py", __doc__.splitlines()[0]
    script.parser.set_defaults(checkpoint_path=os.devnull + ".none")
    args = script.parse_args()
    script.ddp_setup(int(os.environ["LOCAL_RANK"]))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    profiler, gradients = profiled_steps(script, args, rank)
    profiler.export_chrome_trace(f"trace-{rank}.json")
    steps = timelines(profiler)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(steps, gathered)
    if rank == 0:
        rows = [means(steps) for steps in gathered]
        report(rows)
        record = {"machine": machine(), "gradient_bytes": gradients, "milliseconds_by_rank": rows}
        Path("breakdown.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        usual = sorted(range(STEPS), key=lambda n: length(steps[n]))[STEPS // 2]
        draw([steps[usual] for steps in gathered], "breakdown.svg")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
