"""Forecast a training step from a recorded one: a slower network, a larger batch, accumulation.

breakdown.py records steps; the page diffs/index.html redraws one by forecasted() below. It says how
far off the forecast is for what was measured on the same machine. It was never held against a
cluster.
"""

import numpy as np
from scipy.optimize import nnls

# ---------------------------------------------------------------- the network


def ring(ranks, size, alpha, beta):
    """Return the seconds of an all-reduce of size bytes around a ring.

    It takes 2 (n - 1) messages of size / n in sequence (Patarasuk and Yuan, 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002). Each takes alpha seconds and beta per byte.
    """
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def fit(records):
    """Return the alpha and beta of a ring that fit what communication.py wrote.

    The relative errors are minimized, so that small messages count as much as large ones, and
    neither result is negative (non-negative least squares, from SciPy).
    """
    measured = [
        (record["world_size"], int(size), times["all_reduce"])
        for record in records
        for size, times in record["seconds"].items()
    ]
    steps = np.array([[ring(n, size, 1, 0), ring(n, size, 0, 1)] for n, size, _ in measured])
    seconds = np.array([row[2] for row in measured])
    scale = np.linalg.norm(steps / seconds[:, None], axis=0)  # alpha and beta differ by orders
    found, _ = nnls(steps / seconds[:, None] / scale, np.ones(len(measured)))
    return tuple(found / scale)


# ---------------------------------------------------------------- the step


def sent(ready, times):
    """Return when each bucket's all-reduce starts and ends: one at a time, none before it is ready.

    DDP sends a bucket as soon as its gradients are there, while backward computes the others.
    """
    found, free = [], 0
    for moment, time in zip(ready, times, strict=True):
        start = max(moment, free)
        free = start + time
        found.append((start, free))
    return found


def end_of(ranks):
    """Return the moment that the last rank ended its step."""
    return max(rank["optimizer"][-1][1] for rank in ranks)


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
