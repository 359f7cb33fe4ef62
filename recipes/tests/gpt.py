"""The exercise's GPT, split in various ways: small copies, and what each rank holds."""

import json
import re

from patching import page, text_of
from support.jobs import finished
from support.scripts import ROOT, forked, on_each_rank, write

# The whole model trains for seconds: on five batches, of which the last is smaller.
SMALL = [
    (
        "windows(numbers[:split]), windows(numbers[split:])",
        "windows(numbers[:4_900]), windows(numbers[split:][:330])",
    ),
    ("for character in text])", "for character in text[:20_000]])"),
    ("sorted(set(text))", "sorted(set(text))[:103]"),  # later versions of Python have more
    ("batch_size = 32", "batch_size = 4"),
]
DOUBLE = "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)\n"
# In the fourth step, when DDP has rearranged its buckets: how many numbers each rank holds.
STEPPED = "            scheduler.step()\n"
COUNTED = (
    STEPPED,
    f"""{STEPPED}\
            if (epoch, step) == (0, 3):
                own = lambda t: t.to_local() if hasattr(t, "to_local") else t
                size = lambda tensors: sum(own(t).numel() for t in tensors if t is not None)
                states = getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO: its part
                held = [
                    size(model.parameters()),
                    size(p.grad for p in model.parameters()),
                    size(t for s in states for t in s.values() if t.numel() > 1),
                ]
                {on_each_rank('f"held {held}"')}""",
)


def small(folder, name, *changes, double=True):
    """Write a small version of a recipe, or of the exercise's solution, that says what it holds."""
    solution = ROOT / "exercise" / "solution.py"
    text = solution.read_text("utf-8") if name == "solution" else text_of(f"recipes/{name}")
    text = re.sub(r"(write\(\w+), \d+\)", r"\1, 5)", text)  # the text at the end
    if double:
        text = text.replace("torch.float32", "torch.float64")
        text = text.replace('torch.bfloat16 if device.type == "cuda" else None', "None")
        text = text.replace("torch.manual_seed(0)\n", DOUBLE)
    # Where every rank writes the text, since that is a collective, each prints what it got.
    text = text.replace("log(write(model, 5))", on_each_rank("repr(write(model, 5))").rstrip())
    return write(folder / f"{name}.py", text, [*SMALL, *changes, COUNTED])


def trained(folder, name, *changes, epochs=1, nprocs=4, **options):
    """Train a small version in a folder; return the Result."""
    folder.mkdir(exist_ok=True)
    path = small(folder, name, *changes, **options)
    return finished(forked(path, str(epochs), nprocs=nprocs), folder)


def held(job):
    """Return how many parameters, gradients and numbers of optimizer state each rank holds."""
    found = re.findall(r"rank (\d): held (.+)$", job.stdout, re.MULTILINE)
    return [json.loads(numbers) for _, numbers in sorted(found)]


def held_out(job):
    """Return the loss on the held-out windows."""
    return float(re.search(r"^held-out loss ([\d.]+)$", job.stdout, re.MULTILINE)[1])


def on_page(name, *numbers):
    """Check that a recipe's page has these counts of float32 numbers, in bytes."""
    for number in numbers:
        assert f"{4 * number:,} " in page(f"recipes/{name}"), (name, 4 * number)
