"""The exercise's GPT, split in various ways: small copies, and what each rank holds and sends."""

import json
import re

from support.jobs import finished
from support.scripts import ROOT, forked, page, text_of, write

# The whole model trains for seconds: on five batches, of which the last is smaller.
SMALL = [
    (
        "Windows(numbers[:split]), Windows(numbers[split:])",
        "Windows(numbers[:4_900]), Windows(numbers[split:][:330])",
    ),
    ("for character in text])", "for character in text[:20_000]])"),
    ("batch_size = 32", "batch_size = 4"),
]
DOUBLE = "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)\n"
BY_HEAD = [  # the rows of qkv in the order of a tensor-parallel model
    ("view(n, length, 3, heads, width // heads)", "view(n, length, heads, 3, width // heads)"),
    ("permute(2, 0, 3, 1, 4)", "permute(3, 0, 2, 1, 4)"),
]
# In the fourth step, when DDP has rearranged its buckets: a profile of its collectives, and then
# how many numbers each rank holds.
START = "            optimizer.zero_grad()\n"
STOP = "            scheduler.step()\n"
COUNTED = [
    (
        START,
        f"""            if (epoch, step) == (0, 3):
                profiler = torch.profiler.profile(record_shapes=True)
                profiler.start()
{START}""",
    ),
    (
        STOP,
        f"""            if (epoch, step) == (0, 3):
                profiler.stop()
                import json, re
                own = lambda t: t.to_local() if hasattr(t, "to_local") else t
                size = lambda tensors: sum(own(t).numel() for t in tensors if t is not None)
                states = getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO: its part
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
                line = json.dumps(dict(rank=dist.get_rank(), held=held, calls=calls))
                print(f"counted {{line}}\\n", end="", flush=True)
{STOP}""",
    ),
]


def small(folder, name, *changes, double=True, count=False):
    """Write a small version of a recipe, or of the exercise's solution, that counts."""
    solution = ROOT / "exercise" / "solution.py"
    text = solution.read_text("utf-8") if name == "solution" else text_of(f"recipes/{name}")
    text = re.sub(r"(write\(\w+), \d+\)", r"\1, 5)", text)  # the text at the end
    for old, new in BY_HEAD:
        text = text.replace(old, new)
    if double:
        text = text.replace("torch.float32", "torch.float64")
        text = text.replace("torch.manual_seed(0)\n", DOUBLE)
    return write(folder / f"{name}.py", text, [*SMALL, *changes, *(COUNTED if count else [])])


def trained(folder, name, *changes, epochs=1, nprocs=4, **options):
    """Train a small version in a folder; return the Result."""
    folder.mkdir(exist_ok=True)
    path = small(folder, name, *changes, **options)
    return finished(forked(path, str(epochs), nprocs=nprocs), folder)


def counted(job):
    """Return how many numbers each rank holds, [{what: count}], and calls: [[(name, counts)]]."""
    found = [json.loads(line) for line in re.findall("^counted (.*)$", job.stdout, re.MULTILINE)]
    found.sort(key=lambda one: one["rank"])
    return [one["held"] for one in found], [one["calls"] for one in found]


def sent(calls, ranks, gathers=1):
    """Return how many numbers a rank sends around rings of so many ranks, in all collectives.

    Around a ring, gathering n numbers in all sends n (N - 1) / N, a reduce-scatter and a broadcast
    as many, and an all-reduce twice as many (nccl-tests, PERFORMANCE.md). Gloo scatters a sum by
    an all-reduce; NCCL does not, so that is counted as a reduce-scatter.
    """
    total, share = 0, (ranks - 1) / ranks
    for (asked, _), (name, sizes) in zip([("", []), *calls], calls, strict=False):
        size = sizes[0] if sizes else 1  # a scalar has no shape
        if name == "gloo:all_gather":  # the size of one part
            total += gathers * size * (ranks - 1)
        elif name == "gloo:all_reduce":
            total += (1 if "reduce_scatter" in asked else 2) * size * share
        elif name == "gloo:broadcast":
            total += size * share
        elif name == "gloo:send":
            total += size
        else:
            assert name.startswith("c10d::") or name == "gloo:recv", name
    return total


def held_out(job):
    """Return the loss on the held-out windows."""
    return float(re.search(r"^held-out loss ([\d.]+)$", job.stdout, re.MULTILINE)[1])


def on_page(name, *numbers, size=4):
    """Check that a recipe's page has these counts of numbers, in bytes."""
    text = page(f"recipes/{name}")
    for number in numbers:
        assert f"{size * number:,.0f} " in text, (name, size * number)
