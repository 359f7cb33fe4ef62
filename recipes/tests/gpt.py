"""The exercise's GPT, split in various ways: small copies, and what each rank holds and sends."""

import json
import re

from support.jobs import finished
from support.scripts import ROOT, forked, patched, write

SMALL = [  # the whole model, trained for seconds
    (
        "Windows(numbers[:split]), Windows(numbers[split:])",
        "Windows(numbers[:9_000]), Windows(numbers[split:][:1_000])",
    ),
    ("batch_size = 32", "batch_size = 4"),
]
DOUBLE = (
    "torch.manual_seed(0)\n",
    "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)\n",
)

# In the fourth step, when DDP has rearranged its buckets: a profile of its collectives, and then
# how many numbers each rank holds.
START = "        optimizer.zero_grad()\n"
STOP = "        scheduler.step()\n"
COUNTED = [
    (
        START,
        f"""        if (epoch, step) == (0, 3):
            profiler = torch.profiler.profile(record_shapes=True)
            profiler.start()
{START}""",
    ),
    (
        STOP,
        f"""        if (epoch, step) == (0, 3):
            profiler.stop()
            own = lambda t: t.to_local() if hasattr(t, "to_local") else t
            size = lambda tensors: sum(own(t).numel() for t in tensors if t is not None)
            states = getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO: its own part
            held = dict(
                parameters=size(model.parameters()),
                gradients=size(p.grad for p in model.parameters()),
                optimizer=size(t for s in states for t in s.values() if t.numel() > 1),
            )
            calls = [
                (event.name, [math.prod(shape) for shape in event.input_shapes if shape])
                for event in profiler.events()
                if re.match("c10d::|gloo:", event.name)
            ]
            import json
            line = json.dumps(dict(rank=dist.get_rank(), held=held, calls=calls))
            print(f"counted {{line}}\\n", end="", flush=True)
{STOP}""",
    ),
    ("import os\n", "import os\nimport re\n"),
]


def small(folder, name, *changes, counted=True):
    """Write a small version of a recipe, or of the exercise's solution, that counts."""
    changes = [*SMALL, *changes, *(COUNTED if counted else [])]
    if name == "solution":
        path = ROOT / "exercise" / "solution.py"
        return write(folder / path.name, path.read_text(encoding="utf-8"), changes)
    return patched(folder, f"recipes/{name}", *changes)


def trained(folder, name, *changes, epochs=1, nprocs=4, **options):
    """Train a small version in a new folder; return the Result."""
    folder.mkdir(exist_ok=True)
    path = small(folder, name, *changes, **options)
    return finished(forked(path, str(epochs), nprocs=nprocs), folder)


def counted(job):
    """Return how many numbers each rank holds, [{what: count}], and calls: [[(name, counts)]]."""
    found = [json.loads(line) for line in re.findall("^counted (.*)$", job.stdout, re.MULTILINE)]
    found.sort(key=lambda one: one["rank"])
    return [one["held"] for one in found], [one["calls"] for one in found]


def sent(calls, ranks):
    """Return how many numbers a rank sends, on average, in collectives over so many ranks.

    Around a ring: an all-gather and a reduce-scatter of n numbers in all send n (N - 1) / N, a
    broadcast as many, and an all-reduce twice as many (nccl-tests, PERFORMANCE.md).
    """
    share = (ranks - 1) / ranks
    parts = {
        "c10d::_allgather_base_": (0, share),  # (which of its counts is the whole, its factor)
        "c10d::_reduce_scatter_base_": (1, share),
        "gloo:broadcast": (0, share),
        "gloo:all_reduce": (0, 2 * share),
    }
    # Gloo scatters a sum by an all-reduce; NCCL does not, and it is not what the script asks for.
    calls = [call for before, call in zip([("",), *calls], calls) if "scatter" not in before[0]]
    return sum(sizes[parts[name][0]] * parts[name][1] for name, sizes in calls if name in parts)


def held_out(job):
    """Return the loss on the held-out windows."""
    return float(re.search(r"^held-out loss ([\d.]+)$", job.stdout, re.MULTILINE)[1])
