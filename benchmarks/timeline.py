"""Record one training step of every rank: forward, backward, each bucket of gradients, optimizer.

    torchrun --standalone --nproc-per-node=2 benchmarks/timeline.py

It runs steps of 05_gather_eval.py under torch.profiler, and writes the fastest one to
timeline-N.json and timeline-N.svg, where N is the world size. The default model fits into one of
DDP's 25 MB buckets, so this one is wider, with smaller buckets.

The page diffs/index.html shows the step, and redraws it for a slower network, a larger batch or
gradient accumulation by forecasted() below, which builds on forecast.py and is calibrated by the
recorded step. Larger batches and accumulation are measured too, so the page can say how far off the
forecast is.
"""

import os
from itertools import islice

import torch.distributed as dist
from breakdown import PARTS, spans
from forecast import ring
from matplotlib.patches import Patch
from shared import GREY, drawing, load, parser_of, positive, positive_int, prepared, write
from torch.profiler import ProfilerActivity, profile

WARM_UP, STEPS, FACTOR = 5, 60, 4
FEW = 10  # steps of what is measured besides
DDP = "self.model = DDP(model)"
NO_SYNC = "nullcontext() if last else self.model.no_sync()"
COLOURS = {name: colour for name, colour in PARTS.items() if name != "other"}

# ---------------------------------------------------------------- the recording


def profiled(args, step="05", batch=1, changes=(), steps=STEPS):
    """Profile some steps of a script or recipe, with a batch so many times larger.

    Return the profiler's events, the sizes of the buckets in bytes, and the time that the events
    count from, in milliseconds.
    """
    words = [f"--width={args.width}", f"--batch-size={batch * args.batch_size}"]
    small = (DDP, f"{DDP[:-1]}, bucket_cap_mb={args.bucket_mb})")
    words.append("--checkpoint-path=.timeline.pt")
    trainer = prepared(step, words, [small, *changes]).trainer
    run = run_groups if step == "accumulation" else run_batches
    run(trainer, WARM_UP)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(trainer, steps)
    sizes = trainer.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    origin = profiler.profiler.kineto_results.trace_start_ns() / 1e6
    return profiler.events(), [int(size) for size in sizes.split(",")], origin


def run_batches(trainer, steps):
    for source, targets in islice(trainer.train_loader, steps):
        trainer._run_batch(source, targets)


def run_groups(trainer, steps):
    """Train as the recipe for gradient accumulation does."""
    for group in islice(trainer._groups(), steps):
        samples = sum(len(targets) for _, targets in group)
        trainer.optimizer.zero_grad()
        for part, (source, targets) in enumerate(group, 1):
            trainer._run_batch(source, targets, samples, part == len(group))


def steps_of(events, origin):
    """Return for each step {part: [(start, end), ...]}, in milliseconds of the machine's clock.

    A bucket is ready when its last gradient is; DDP then hands it to gloo, which sends two at a
    time. What is between the last function of backward and the optimizer is spent waiting.
    """
    fetched = spans(events, "enumerate(DataLoader)")
    ahead = spans(events, "DistributedDataParallel.forward")
    functions = spans(events, "autograd::engine::evaluate_function")
    handed_over, reduced = spans(events, "c10d::allreduce_"), spans(events, "gloo:all_reduce")
    steps = []
    for data, forward, update in zip(fetched, ahead, spans(events, "Optimizer.step")):
        inside = [span for span in functions if forward[1] <= span[0] < update[0]]
        backward = inside[0][0], max(end for _, end in inside)
        ready = [(start, start) for start, _ in handed_over if forward[1] <= start < update[0]]
        sums = [span for span in reduced if forward[1] <= span[0] < update[0]]
        step = {
            "data": [data],
            "forward": [forward],
            "backward": [backward],
            "waiting": [(backward[1], update[0])],
            "optimizer": [update],
            "ready": ready,
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
    chosen = min(range(len(steps)), key=lambda n: end_of(steps[n]) - begins[n])
    return [
        {name: shifted(found, -begins[chosen]) for name, found in rank.items()}
        for rank in steps[chosen]
    ]


def end_of(ranks):
    """Return the moment that the last rank ended its step."""
    return max(rank["optimizer"][-1][1] for rank in ranks)


def shortest(events):
    """Return the fewest milliseconds from a step's first batch to the end of its optimizer."""
    ends = [end for _, end in spans(events, "Optimizer.step")]
    starts = [start for start, _ in spans(events, "enumerate(DataLoader)")]
    firsts = [min(start for start in starts if start > end) for end in [0, *ends[:-1]]]
    return min(end - first for first, end in zip(firsts, ends))


def measured(args):
    """Measure what the page forecasts: return the settings, each with its milliseconds."""
    found = []
    for batch, passes, no_sync in ((FACTOR, 1, True), (1, FACTOR, True), (1, FACTOR, False)):
        changes = [] if no_sync else [(NO_SYNC, "nullcontext()")]
        step = "05" if passes == 1 else "accumulation"
        events, *_ = profiled(args, step, batch, changes, FEW)
        settings = {"slower": 1, "batch": batch, "passes": passes, "no_sync": no_sync}
        found.append({**settings, "milliseconds": round(shortest(events), 3)})
    return found


# ---------------------------------------------------------------- the forecast


def sent(ready, times):
    """Return when each bucket's all-reduce starts and ends: one at a time, none before it is ready.

    If the buckets are of one size and become ready at equal intervals until backward ends, this
    ends as late after backward as forecast.waiting() says.
    """
    found, free = [], 0
    for moment, time in zip(ready, times, strict=True):
        start = max(moment, free)
        free = start + time
        found.append((start, free))
    return found


def calibrated(record, network):
    """Return a network as much slower as makes the undisturbed forecast as long as the recording.

    All-reduces in a step take longer than those that the network was fitted to, since backward and
    the other ranks need the processor as well.
    """
    ranks, sizes = record["ranks"], record["bucket_bytes"]
    total = 1e3 * ring(len(ranks), sum(sizes), *network)
    longest = max(end - start for rank in ranks for start, end in rank["optimizer"])
    ready = [max(moments) for moments in zip(*(rank["ready"] for rank in ranks), strict=True)]
    # The last sum ends when the optimizer starts. One of the buckets decides: it and those after it
    # are sent without a break.
    factor = min(
        (end_of(ranks) - longest - moment) / (total * sum(sizes[number:]) / sum(sizes))
        for number, (moment, _) in enumerate(ready)
    )
    return tuple(factor * value for value in network)


def forecasted(record, network, slower=1, batch=1, passes=1, no_sync=True):
    """Return a recorded step, changed: {part: [(start, end), ...]} of each rank, in milliseconds.

    network is a latency and the seconds per byte, and `slower` times slower than that. A batch so
    many times larger makes everything until the end of backward take longer. Of several passes
    forward and backward before the optimizer's step, only the last one communicates with no_sync.
    """
    ranks, sizes = record["ranks"], record["bucket_bytes"]
    total = 1e3 * slower * ring(len(ranks), sum(sizes), *network)
    times = [total * size / sum(sizes) for size in sizes]
    steps = [{name: [] for name in rank} for rank in ranks]
    starts = [rank["data"][0][0] for rank in ranks]
    for last in [*[False] * (passes - 1), True]:
        sums = []
        computed = [stretched(rank, start, batch) for rank, start in zip(ranks, starts)]
        if last or not no_sync:
            last_ready = [max(moments) for moments in zip(*(part["ready"] for part in computed))]
            sums = sent([moment for moment, _ in last_ready], times)
        starts = []
        for step, part in zip(steps, computed):
            ((_, end),) = part["backward"]
            starts.append(max([end, *(after for _, after in sums)]))
            part |= {"ready": part["ready"] if sums else [], "all-reduce": sums}
            part["waiting"] = [(end, starts[-1])]
            for name, found in part.items():
                step[name] += found
    for rank, step, start in zip(ranks, steps, starts):
        ((begin, end),) = rank["optimizer"]
        step["optimizer"].append((start, start + end - begin))
    return steps


def stretched(rank, start, factor):
    """Return the parts of a rank's step until the end of backward, from a start, and stretched."""
    origin = rank["data"][0][0]
    return {
        name: [tuple(start + factor * (moment - origin) for moment in span) for span in rank[name]]
        for name in ("data", "forward", "backward", "ready")
    }


def compared(record, network):
    """Return what was measured as [(name, forecast, measured)], in milliseconds.

    The first row is what the forecast is calibrated by, so there the fitted network is used.
    """
    first = end_of(forecasted(record, network))
    found = [("as recorded, not calibrated", first, end_of(record["ranks"]))]
    slower = calibrated(record, network)
    for row in record["measured"]:
        settings = {name: row[name] for name in ("slower", "batch", "passes", "no_sync")}
        name = f"batch x {row['batch']}" if row["passes"] == 1 else f"{row['passes']} batches"
        if row["passes"] > 1:
            name += f", with{'' if row['no_sync'] else 'out'} no_sync"
        forecast = end_of(forecasted(record, slower, **settings))
        found.append((name, forecast, row["milliseconds"]))
    return found


# ---------------------------------------------------------------- the picture


def draw(ranks, path):
    """Draw a step of each rank: its parts, below them the all-reduce of each bucket."""
    with drawing(path, "One training step", figsize=(9, 0.9 + 0.9 * len(ranks))) as axis:
        for number, rank in enumerate(ranks):
            for name, colour in COLOURS.items():
                for start, end in rank[name]:
                    axis.barh(2 * number, end - start, 0.7, left=start, color=colour)
            for bucket, (start, end) in enumerate(rank["all-reduce"], 1):
                y = 2 * number + (0.58 if bucket % 2 else 0.94)  # two are sent at a time
                axis.barh(y, end - start, 0.3, left=start, color=GREY)
            ready = [start for start, _ in rank["ready"]]
            axis.plot(ready, [2 * number - 0.5] * len(ready), "o", color=GREY, markersize=4)
        handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
        handles.append(Patch(color=GREY, label="all-reduce of a bucket"))
        axis.figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
        axis.set(xlabel="milliseconds", yticks=[2 * number for number in range(len(ranks))])
        axis.set_yticklabels([f"rank {number}" for number in range(len(ranks))])
        axis.invert_yaxis()


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=positive_int, default=8, help="per process")
    parser.add_argument("--width", type=positive_int, default=128, help="of the model")
    parser.add_argument("--bucket-mb", type=positive, default=0.25, help="DDP's bucket_cap_mb")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node=2 timeline.py")
    return args


def main():
    args = parse_args()
    others = os.getloadavg()[0]  # what else runs here
    load("05").ddp_setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    events, sizes, origin = profiled(args)
    by_rank = [None] * world_size if rank == 0 else None
    dist.gather_object(steps_of(events, origin), by_rank)
    variants = measured(args)
    if rank == 0:
        ranks = fastest_step(by_rank)
        found = {"world_size": world_size, "bucket_bytes": sizes, "ranks": ranks}
        write(f"timeline-{world_size}", args, **found, measured=variants, load_average=others)
        draw(ranks, f"timeline-{world_size}.svg")
        print(f"a step of {end_of(ranks):.1f} ms in timeline-{world_size}.svg")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
