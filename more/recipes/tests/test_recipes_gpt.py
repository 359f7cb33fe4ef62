"""Recipes that split the exercise's GPT: who holds what, and the numbers of DDP."""

import json
import re
import shutil
from functools import cache

import pytest
from patching import page, text_of
from running import same, saved
from support.jobs import finished
from support.results import losses, printed_by
from support.scripts import ROOT, digest, forked, on_each_rank, write

# All in one process, which shares their fixture.
pytestmark = [pytest.mark.slow, pytest.mark.gpu, pytest.mark.xdist_group("gpt")]
PARAMETERS = 117_479  # of the GPT
END = "model.eval()\n"
DESTROYED = "dist.destroy_process_group()\n"
THREADS = """\
time.sleep(1)  # Linux lists a thread for a moment after it has ended
os.system(f"cat /proc/{os.getpid()}/task/*/comm")
"""
LISTED = (DESTROYED, DESTROYED + THREADS)
SHARDS = digest("[parameter.to_local() for parameter in model.parameters()]")
COPIES = {"zero_optimizer": 4, "fsdp2_gpt": 1}  # of the parameters, on all four ranks together
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
COUNTED = (
    "            scheduler.step()\n",
    f"""            scheduler.step()
            if (epoch, step) == (0, 3):
                own = lambda t: t.to_local() if hasattr(t, "to_local") else t
                size = lambda tensors: sum(own(t).numel() for t in tensors if t is not None)
                states = getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO: its part
                held = [size(model.parameters()), size(p.grad for p in model.parameters())]
                held.append(size(t for s in states for t in s.values() if t.numel() > 1))
                {on_each_rank('f"held {held}"')}""",
)


def trained(folder, name, *changes, epochs=1, nprocs=4):
    """Train a small recipe, or the exercise's solution, in double precision; return the Job."""
    ddp = (ROOT / "more" / "exercise" / "solution.py").read_text("utf-8")
    text = ddp if name == "solution" else text_of(f"more/recipes/{name}")
    text = re.sub(r"(write\(\w+), \d+\)", r"\1, 5)", text)  # the text at the end
    text = text.replace("torch.float32", "torch.float64")
    text = text.replace('torch.bfloat16 if device.type == "cuda" else None', "None")
    text = text.replace("torch.manual_seed(0)\n", DOUBLE)
    path = write(folder / f"{name}.py", text, [*SMALL, *changes, COUNTED, LISTED])
    return finished(forked(path, str(epochs), nprocs=nprocs), folder)


def held(job):
    """Return how many parameters, gradients and numbers of optimizer state each rank holds."""
    found = re.findall(r"rank (\d): held (.+)$", job.stdout, re.MULTILINE)
    return [json.loads(numbers) for _, numbers in sorted(found)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the Jobs of an epoch on four ranks, and of the next one on two."""

    @cache
    def train(name):
        job = trained(tmp_path_factory.mktemp(name), name)
        again = shutil.copytree(job.cwd, tmp_path_factory.mktemp(name) / "again")
        return job, trained(again, name, epochs=2, nprocs=2)

    return train


def numbers(job):
    """Return the losses that a job printed, in training and on the held-out windows."""
    return losses(job), re.search(r"^held-out loss (.+)$", job.stdout, re.MULTILINE)[1]


@pytest.mark.parametrize("name", COPIES)
def test_trains_like_ddp(runs, name):
    """The losses are those of DDP, and a rank holds no more than the page says."""
    job, again = runs(name)
    assert [numbers(job), numbers(again)] == [numbers(other) for other in runs("solution")]
    assert f"resuming from {name}.pt after epoch 1\nepoch 2" in again.stdout
    parameters, gradients, states = zip(*held(job))
    assert parameters == gradients
    assert 1 <= sum(parameters) / PARAMETERS / COPIES[name] < 1.05  # with copies of the norms
    assert 1 <= sum(states) / 2 / PARAMETERS < 1.05
    for number in 2 * max(parameters), max(states):
        assert f"{4 * number:,} " in page(f"more/recipes/{name}")  # in bytes


def test_zero_optimizer(runs):
    """The same checkpoint as DDP, of which each rank holds all of the optimizer's state.

    At the end, also after a resume, no thread of gloo is left.
    """
    (job, again), (ddp, _) = runs("zero_optimizer"), runs("solution")
    assert not any("gloo" in each.stdout for each in (job, again))
    assert same(saved(job, "zero_optimizer.pt"), saved(ddp, "gpt.pt"))
    assert held(ddp) == [[PARAMETERS, PARAMETERS, 2 * PARAMETERS]] * 4


def test_fsdp2_gpt_with_a_copy_on_each_node(runs, tmp_path):
    """With the page's mesh, two nodes of two ranks hold the same shards, and train like DDP."""
    (mesh,) = re.findall(r"^```python\n(.*?)^```$", page("more/recipes/fsdp2_gpt"), re.M | re.S)
    shard = "for module in ("
    changes = [
        (shard, f"nodes = gpus_per_node = 2\n{mesh}{shard}"),
        ("module, mp_policy", "module, mesh=mesh, mp_policy"),
        (END, on_each_rank(SHARDS) + END),
    ]
    job = trained(tmp_path, "fsdp2_gpt", *changes)
    assert numbers(job) == numbers(runs("solution")[0])
    shards = [printed_by(job, rank)[-1] for rank in range(4)]
    assert shards[:2] == shards[2:]
    assert shards[0] != shards[1]


def test_fsdp2_gpt_in_bf16(tmp_path):
    """The blocks compute in bf16; the shards, and so their gradients, stay in double precision."""
    bf16 = ("MixedPrecisionPolicy(None", "MixedPrecisionPolicy(torch.bfloat16")
    show = on_each_rank("found[2].dtype").rstrip()
    call, hook = "interrupted = train(", f"register_forward_hook(lambda *found: {show})\n"
    shards = (END, on_each_rank("next(model.parameters()).dtype") + END)
    changes = bf16, (call, f"model.blocks[0].{hook}{call}"), shards
    job = trained(tmp_path, "fsdp2_gpt", *changes, nprocs=2)
    assert printed_by(job, 1)[0] == "torch.bfloat16"
    assert "torch.float64" in printed_by(job, 1)
