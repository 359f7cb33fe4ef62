"""Recipes that split each layer, or the layers, of the exercise's GPT over the ranks."""

import ast
import re
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from gpt import DOUBLE, counted, held_out, trained
from support.jobs import run
from support.results import losses, said
from support.scripts import forked, on_each_rank, page, write

SLOW = pytest.mark.slow
BATCH = 16  # of the small copies, on all four ranks together
REAL_BATCH = 128  # of what the pages count
LENGTH, WIDTH = 64, 64
PARAMETERS, DEEP_PARAMETERS = 117_479, 217_447  # with two layers and four
MICROBATCHES = 8
# What one of four ranks holds of a block, and of the rest, after both splits.
BLOCK_PART, REST_PART = 12_592, 4_442
BY_HEAD = [  # the solution, with the rows of qkv in the order of a tensor-parallel model
    ("view(n, length, 3, heads, width // heads)", "view(n, length, heads, 3, width // heads)"),
    ("permute(2, 0, 3, 1, 4)", "permute(3, 0, 2, 1, 4)"),
]
# Five batches, the last one smaller.
FEW = ("numbers[:9_000]", "numbers[:4_900]")
BRIEF = ("write(model, 300)", "write(model, 3)")
SHORT = ("write(model, 100)", "write(model, 3)")  # the same for a recipe
FORWARD_BRIEF = ("write(forward, 100)", "write(forward, 3)")
ON_ALL = ("    log(write(model, 100))", f"    {on_each_rank('write(model, 20)').rstrip()}")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The solution of the exercise on four ranks, in double precision."""
    return trained(tmp_path_factory.mktemp("ddp"), "solution", FEW, DOUBLE, BRIEF, *BY_HEAD)


def numbers_on(name):
    """Return the numbers of bytes on a recipe's page."""
    found = re.findall(r"([\d,]+) bytes", page(f"recipes/{name}"))
    return {int(number.replace(",", "")) for number in found}


def passed(calls, ranks):
    """Return how many numbers a rank sends around rings of so many ranks, in all collectives.

    Gloo scatters a sum by an all-reduce. NCCL does not, so it is counted as a reduce-scatter.
    """
    total = 0
    for (asked, _), (name, sizes) in zip([("", []), *calls], calls, strict=False):
        if name == "gloo:all_gather":  # the size of one part
            total += sizes[0] * (ranks - 1)
        elif name == "gloo:all_reduce":
            times = 1 if "reduce_scatter" in asked else 2
            size = sizes[0] if sizes else 1  # a scalar has no shape
            total += size * times * (ranks - 1) / ranks
        elif name == "gloo:send":
            total += sizes[0]
        else:
            assert name.startswith("c10d::") or name == "gloo:recv", name
    return total


def same_training(job, other):
    """Check that two jobs print the same losses and save the same weights, up to rounding."""
    assert losses(job) == losses(other)
    assert held_out(job) == held_out(other)
    a, b = (torch.load(next(one.cwd.glob("*.pt")))["model"] for one in (job, other))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def fits_page(name, job, ddp, sent_per_step):
    """Check a page's table: what the ranks hold, and send with batches of a size."""
    held, _ = counted(job)
    (whole, *_), (ddp_calls, *_) = counted(ddp)
    most = max(rank["parameters"] for rank in held)
    assert whole["parameters"] == PARAMETERS
    for rank in held:
        assert rank["parameters"] == rank["gradients"] == rank["optimizer"] / 2
    numbers = {2 * most, sent_per_step(REAL_BATCH), 2 * PARAMETERS, passed(ddp_calls, 4)}
    assert {4 * number for number in numbers} <= numbers_on(name)


@SLOW
def test_tensor_parallel(ddp, tmp_path):
    """The weights of DDP with the same batches; two ranks resume from what four ranks wrote."""

    def sent_per_step(batch):
        positions = batch * LENGTH
        both_embeddings = 20 * positions * WIDTH / 4 * 3, 2 * 3 * LENGTH * WIDTH / 4
        return sum(both_embeddings) + 1.5 * (3 * positions + 10 * WIDTH + 30)

    job = trained(tmp_path / "four", "tensor_parallel", FEW, DOUBLE, ON_ALL)
    same_training(job, ddp)
    assert len({text for rank in range(4) for text in said(job, rank)}) == 1  # all write the same
    fits_page("tensor_parallel", job, ddp, sent_per_step)
    assert passed(counted(job)[1][0], 4) == sent_per_step(BATCH)
    again = trained(
        tmp_path / "four", "tensor_parallel", FEW, DOUBLE, SHORT, epochs=2, nprocs=2, counted=False
    )
    assert again.stdout.startswith("resuming from tensor_parallel.pt after epoch 1\nepoch 2  loss ")
    assert held_out(again) < held_out(job)


@SLOW
def test_two_dimensional(ddp, tmp_path):
    """The weights of DDP with the same batches; two ranks resume from what four ranks wrote."""

    sharded = 2 * 3 * BLOCK_PART + 2 * REST_PART  # what FSDP2 sends

    def sent_per_step(batch):
        positions = batch // 2 * LENGTH
        tensor = 20 * positions * WIDTH / 2 + 3 * positions + LENGTH * WIDTH + 10 * WIDTH
        return tensor + sharded + 2 * 30

    job = trained(tmp_path / "four", "two_dimensional", FEW, DOUBLE, ON_ALL)
    same_training(job, ddp)
    assert len({text for rank in range(4) for text in said(job, rank)}) == 1  # all write the same
    fits_page("two_dimensional", job, ddp, sent_per_step)
    assert 4 * sharded in numbers_on("two_dimensional")
    assert passed(counted(job)[1][0], 2) == sent_per_step(BATCH)
    again = trained(
        tmp_path / "four", "two_dimensional", FEW, DOUBLE, SHORT, epochs=2, nprocs=2, counted=False
    )
    assert again.stdout.startswith("resuming from two_dimensional.pt after epoch 1\nepoch 2  loss ")
    assert held_out(again) < held_out(job)


# ---------------------------------------------------------------- pipeline

DEEP = ("layers = 2", "layers = 4")
WHOLE_BATCHES = ("ResumableSampler(train_set))", "ResumableSampler(train_set), drop_last=True)")
GPIPE = ("pipeline = Schedule1F1B(", "pipeline = ScheduleGPipe(")
# Prints in which order a rank computes the microbatches of the first step: [["F" or "B", number]].
IN_ORDER = [
    (
        "pipeline = Schedule1F1B(",
        """order = []


def noted(method):
    def run(number, *args, **kwargs):
        order.append((method.__name__[0].upper(), number))
        return method(number, *args, **kwargs)

    return run


stage.forward_one_chunk = noted(stage.forward_one_chunk)
stage.backward_one_chunk = noted(stage.backward_one_chunk)
pipeline = Schedule1F1B(""",
    ),
    (
        "        norm = nn.utils.get",
        f"        if step == 0:\n            {on_each_rank('order')}        norm = nn.utils.get",
    ),
]


def orders(job, ranks):
    return [ast.literal_eval(said(job, rank)[0]) for rank in range(ranks)]


def needed(kind, number, rank, last):
    """Return what must be done before this: (kind, number, rank), or None."""
    if kind == "F":
        return ("F", number, rank - 1) if rank > 0 else None
    return ("B", number, rank + 1) if rank < last else ("F", number, rank)


def idle(orders):
    """Return the share of time in which a rank waits, if all microbatches take the same time.

    A forward pass takes one slot, a backward pass two.
    """
    ends, free = {None: 0}, [0] * len(orders)
    queues = [list(order) for order in orders]
    while any(queues):
        for rank, queue in enumerate(queues):
            if queue and (before := needed(*queue[0], rank, len(queues) - 1)) in ends:
                kind, number = queue.pop(0)
                free[rank] = max(free[rank], ends[before]) + {"F": 1, "B": 2}[kind]
                ends[kind, number, rank] = free[rank]
    return 1 - Fraction(3 * MICROBATCHES, max(free))


def most_kept(order):
    """Return the largest number of microbatches between their forward and backward passes."""
    return max(accumulate(1 if kind == "F" else -1 for kind, _ in order))


@SLOW
def test_pipeline(tmp_path):
    """The weights of DDP, with 1F1B on four ranks and GPipe on two; two resume after four."""
    solution = trained(tmp_path / "ddp", "solution", FEW, DOUBLE, BRIEF, DEEP, WHOLE_BATCHES)
    job = trained(tmp_path / "four", "pipeline", FEW, DOUBLE, FORWARD_BRIEF, *IN_ORDER)
    same_training(job, solution)
    assert idle(orders(job, 4)) == Fraction(3, MICROBATCHES + 3)
    assert [most_kept(order) for order in orders(job, 4)] == [4, 3, 2, 1]

    larger = ("batch_size = 4", "batch_size = 8")
    changes = (FEW, DOUBLE, FORWARD_BRIEF, larger, *IN_ORDER, GPIPE)
    gpipe = trained(tmp_path / "two", "pipeline", *changes, nprocs=2, counted=False)
    same_training(gpipe, solution)
    assert idle(orders(gpipe, 2)) == Fraction(1, MICROBATCHES + 1)
    assert [most_kept(order) for order in orders(gpipe, 2)] == [MICROBATCHES] * 2

    (whole, *_), (ddp_calls, *_) = counted(solution)
    held, calls = counted(job)
    numbers = [rank["parameters"] for rank in held]
    assert sum(numbers) == whole["parameters"] == DEEP_PARAMETERS
    for rank in held:
        assert rank["parameters"] == rank["gradients"] == rank["optimizer"] / 2
    for rank, its_calls in enumerate(calls):
        neighbours = 1 if rank in (0, 3) else 2
        assert passed(its_calls, 4) == neighbours * BATCH * LENGTH * WIDTH + 1.5
    counts = [2 * DEEP_PARAMETERS, 2 * min(numbers), 2 * max(numbers), passed(ddp_calls, 4)]
    counts += [2 * REAL_BATCH * LENGTH * WIDTH + 1.5]
    text = page("recipes/pipeline")
    assert all(f"{4 * count:,.0f} " in text for count in counts)

    again = trained(
        tmp_path / "four", "pipeline", FEW, DOUBLE, FORWARD_BRIEF, epochs=2, nprocs=2, counted=False
    )
    assert again.stdout.startswith("resuming from pipeline.pt after epoch 1\nepoch 2  loss ")
    assert held_out(again) < held_out(job)


# ---------------------------------------------------------------- context parallelism

RING = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

dist.init_process_group("gloo")
qkv = [torch.randn(2, 4, 64, 16) for _ in range(3)]
with context_parallel(init_device_mesh("cpu", (2,)), buffers=qkv, buffer_seq_dims=[2, 2, 2]):
    F.scaled_dot_product_attention(*qkv, is_causal=True)
"""


@SLOW
def test_context_parallel_needs_gpus(tmp_path):
    """Once it runs on CPUs, this fails, and there can be a recipe."""
    job = run(forked(write(tmp_path / "ring.py", RING), nprocs=2), tmp_path)
    text = " ".join(page("recipes/tensor_parallel").split())
    message = re.search("`(Operator aten[^`]+)`", text)[1]
    assert f"NotImplementedError: {message}" in job.stderr
