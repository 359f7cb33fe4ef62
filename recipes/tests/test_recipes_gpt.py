"""Recipes that split the exercise's GPT: who holds what, what is sent, and the numbers of DDP."""

import ast
import re
import shutil
from itertools import accumulate, pairwise

import pytest
import torch
from gpt import counted, held_out, on_page, sent, small, trained
from running import same
from support.jobs import run
from support.positions import writes_nothing_again
from support.results import losses, said
from support.scripts import digest, forked, on_each_rank, page, write

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpt")]  # which shares its fixtures
PARAMETERS, DEEP_PARAMETERS = 117_479, 217_447  # of the GPT, with two layers and with four
LENGTH, WIDTH = 64, 64
BATCH = 16  # of the small copies, on all four ranks together
REAL_BATCH = 128  # of what the pages count
END = "model.eval()\n"


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The solution of the exercise on four ranks, in double precision."""
    return trained(tmp_path_factory.mktemp("ddp"), "solution", count=True)


@pytest.fixture(scope="module")
def resumed(ddp, tmp_path_factory):
    """The same for a second epoch, by two ranks."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copy(ddp.cwd / "gpt.pt", folder)
    return trained(folder, "solution", epochs=2, nprocs=2)


def numbers(job):
    """Return the losses that a job printed."""
    return losses(job), held_out(job)


def saved(job):
    """Return the checkpoint of a job, which is one file."""
    (path,) = job.cwd.glob("*.pt")
    return torch.load(path)


def trains_like(ddp, resumed, folder, name, *changes):
    """Train on four ranks and then on two, with DDP's losses; return the first Result."""
    job = trained(folder, name, *changes, count=True)
    assert numbers(job) == numbers(ddp)
    again = trained(folder, name, epochs=2, nprocs=2)
    assert f"resuming from {name}.pt after epoch 1\nepoch 2" in again.stdout
    assert numbers(again) == numbers(resumed)
    return job


def holds(name, held, copies=1):
    """Check that ranks hold all of it, in so many copies, and no more than the page says."""
    for what, states in {"parameters": 1, "gradients": 1, "optimizer": 2}.items():
        sizes = [rank[what] for rank in held]
        assert sum(sizes) >= copies * states * PARAMETERS
        on_page(name, 2 // states * max(sizes))  # parameters and gradients together


def test_zero_optimizer(ddp, resumed, tmp_path):
    """The same weights and the same checkpoint as DDP."""
    (whole, *_), (calls, *_) = counted(ddp)
    job = trained(tmp_path, "zero_optimizer", count=True)
    assert numbers(job) == numbers(ddp)
    assert same(saved(job), saved(ddp))
    held, (more_calls, *_) = counted(job)
    for rank in held:
        assert rank["parameters"] == rank["gradients"] == whole["parameters"] == PARAMETERS
    assert sum(rank["optimizer"] for rank in held) == whole["optimizer"] == 2 * PARAMETERS
    assert sent(more_calls, 4) == 1.5 * sent(calls, 4) == 1.5 * 2 * 0.75 * PARAMETERS
    most = max(rank["optimizer"] for rank in held)
    on_page("zero_optimizer", most, sent(calls, 4), sent(more_calls, 4))
    again = trained(tmp_path, "zero_optimizer", epochs=2, nprocs=2)
    assert numbers(again) == numbers(resumed)


def test_fsdp2_gpt(ddp, resumed, tmp_path):
    """The numbers of DDP, on four ranks and then on two; a crash in a save loses nothing."""
    job = trained(tmp_path, "fsdp2_gpt", count=True)
    assert numbers(job) == numbers(ddp)
    held, (calls, *_) = counted(job)
    holds("fsdp2_gpt", held)
    on_page("fsdp2_gpt", sent(calls, 4), sent(calls, 4, gathers=0.5))  # in float32, in bf16
    kill = """        if (epochs_run, dist.get_rank()) == (2, 1):
            dcp.FileSystemWriter.write_data = lambda *_: signal.raise_signal(signal.SIGKILL)
"""
    killed = small(tmp_path, "fsdp2_gpt", ("        dcp.save(", f"{kill}        dcp.save("))
    assert run(forked(killed, "2"), tmp_path).returncode
    assert not (tmp_path / "fsdp2_gpt.pt.2-0" / ".metadata").exists()
    at_once = ("checkpoint = {}", "stop_signals.append(signal.SIGTERM)\ncheckpoint = {}")
    writes_nothing_again(small(tmp_path, "fsdp2_gpt", at_once), "2")
    again = trained(tmp_path, "fsdp2_gpt", epochs=2, nprocs=2)
    assert numbers(again) == numbers(resumed)
    assert "after epoch 1\nepoch 2" in again.stdout


def test_fsdp2_gpt_in_bf16(tmp_path):
    """Parameters are gathered in bf16, and gradients summed in float32."""
    everywhere = ('torch.bfloat16 if device.type == "cuda" else None', "torch.bfloat16")
    calls = "{(e.name, e.input_dtypes[0]) for e in profiler.events() if '_base_' in e.name}"
    end = "        dist.all_reduce(total)"
    types = (end, f"        {on_each_rank(f'sorted({calls})')}{end}")
    changes = everywhere, types
    job = trained(tmp_path, "fsdp2_gpt", *changes, nprocs=2, double=False, count=True)
    wanted = [("c10d::_allgather_base_", "c10::BFloat16"), ("c10d::_reduce_scatter_base_", "float")]
    assert f"rank 1: {wanted}" in job.stdout


def test_hybrid_sharding(ddp, resumed, tmp_path):
    """Two nodes hold the same shards, and exchange sums of gradients."""
    digests = digest("[p.to_local() for p in model.parameters()]")
    shards = (END, on_each_rank(digests) + END)
    job = trains_like(ddp, resumed, tmp_path, "hybrid_sharding", shards)
    node, other = [[said(job, rank) for rank in ranks] for ranks in ((0, 1), (2, 3))]
    assert node == other
    assert node[0] != node[1]
    held, (calls, *_) = counted(job)
    holds("hybrid_sharding", held, copies=2)
    sums = [after[1][0] for before, after in pairwise(calls) if before[0] == "c10d::allreduce_"]
    *gradients, _ = sums  # the last is for the norm
    assert sum(gradients) == held[0]["gradients"]
    between = 2 * sum(gradients)  # from one node to the other, by its two ranks
    on_page("hybrid_sharding", sent(calls, 2), between)
    assert sent(counted(ddp)[1][0], 4) > between


def test_local_sgd(ddp, tmp_path):
    """Ranks send their weights every few steps, and nothing else; they resume with all states."""
    exchange = "                synchronize()\n"
    profiled = f"""\
                with torch.profiler.profile(record_shapes=True) as exchanged:
                    synchronize()
                calls = [(e.name, e.input_shapes) for e in exchanged.events() if "gloo:" in e.name]
                sizes = [t.numel() for t in (common, common.grad, *outer.state[common].values())]
                {on_each_rank("calls, sizes")}"""
    call = "interrupted = train("
    state = on_each_rank(digest("[t for s in outer.state.values() for t in s.values()]"))
    weights = on_each_rank(digest("model.parameters()"))
    changes = [("period = 10", "period = 3"), (exchange, profiled)]
    ends = [(call, state + call), (END, state + weights + END)]
    job = trained(tmp_path, "local_sgd", *changes, *ends, count=True)
    said_by = [said(job, rank) for rank in range(4)]
    assert said_by == [said_by[0]] * 4  # the weights, too
    _, counts, final, _ = said_by[0]
    assert counts == f"([('gloo:all_reduce', [[{PARAMETERS}]])], {[PARAMETERS] * 3})"
    again = trained(tmp_path, "local_sgd", (call, state + call), epochs=2, nprocs=2)
    assert said(again, 1) == [final]  # what it loads
    assert held_out(again) < held_out(job)
    (whole, *_), (ddp_calls, *_) = counted(ddp)
    assert counted(job) == ([whole] * 4, [[]] * 4)  # in a step on its own, a rank sends nothing
    on_page("local_sgd", 3 * PARAMETERS, whole["parameters"] + whole["gradients"])
    on_page("local_sgd", sent(ddp_calls, 4))  # each time


def test_local_sgd_in_each_step(tmp_path):
    """With SGD, the mean in each step, and no clipping, the numbers are those of DDP."""
    inner = [("torch.optim.AdamW(", "torch.optim.SGD("), ("lr = 5e-3", "lr = 0.5")]
    free = ("model.parameters(), 1.0)", "model.parameters(), math.inf)")
    mean = [("period = 10", "period = 1"), ("lr=0.7, momentum=0.5, nesterov=True", "lr=1")]
    one = trained(tmp_path / "one", "solution", *inner, free, nprocs=2)
    other = trained(tmp_path / "other", "local_sgd", *inner, free, *mean, nprocs=2)
    assert numbers(one) == numbers(other)


# ---------------------------------------------------------------- each layer in parts


def splits_layers(name, ddp, resumed, folder, ranks, sent_per_step):
    """Check the weights of DDP, the text that all ranks write, and the page's table."""
    write_it = "    log(write(model, 5))"
    on_all = (write_it, f"    {on_each_rank('write(model, 5)').rstrip()}")
    job = trains_like(ddp, resumed, folder, name, on_all)
    assert len({text for rank in range(4) for text in said(job, rank)}) == 1  # all write the same
    held, (calls, *_) = counted(job)
    for rank in held:
        assert rank["parameters"] == rank["gradients"] == rank["optimizer"] / 2
    assert sent(calls, ranks) == sent_per_step(BATCH)
    on_page(name, 2 * max(rank["parameters"] for rank in held), sent_per_step(REAL_BATCH))


def test_tensor_parallel(ddp, resumed, tmp_path):
    def sent_per_step(batch):
        positions = batch * LENGTH
        both_embeddings = 20 * positions * WIDTH / 4 * 3, 2 * 3 * LENGTH * WIDTH / 4
        return sum(both_embeddings) + 1.5 * (3 * positions + 10 * WIDTH + 30)

    splits_layers("tensor_parallel", ddp, resumed, tmp_path, 4, sent_per_step)


def test_two_dimensional(ddp, resumed, tmp_path):
    block_part, rest_part = 12_592, 4_442  # what a rank holds of a block, and of the rest
    sharded = 2 * 3 * block_part + 2 * rest_part  # what FSDP2 sends

    def sent_per_step(batch):
        positions = batch // 2 * LENGTH
        tensor = 20 * positions * WIDTH / 2 + 3 * positions + LENGTH * WIDTH + 10 * WIDTH
        return tensor + sharded + 2 * 30

    splits_layers("two_dimensional", ddp, resumed, tmp_path, 2, sent_per_step)
    on_page("two_dimensional", sharded)


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


def test_context_parallel_needs_gpus(tmp_path):
    """Once it runs on CPUs, this fails, and there can be a recipe."""
    job = run(forked(write(tmp_path / "ring.py", RING), nprocs=2), tmp_path)
    text = " ".join(page("recipes/tensor_parallel").split())
    message = re.search("`(Operator aten[^`]+)`", text)[1]
    assert f"NotImplementedError: {message}" in job.stderr


# ---------------------------------------------------------------- the layers in stages

MICROBATCHES = 8
# Prints in which order a rank computes the microbatches of the first step: "F" or "B".
IN_ORDER = [
    (
        "pipeline = Schedule1F1B(",
        """order = []


def noted(method):
    def run(*args, **kwargs):
        order.append(method.__name__[0].upper())
        return method(*args, **kwargs)

    return run


stage.forward_one_chunk = noted(stage.forward_one_chunk)
stage.backward_one_chunk = noted(stage.backward_one_chunk)
pipeline = Schedule1F1B(""",
    ),
    (
        "            norm = nn.utils.get",
        "            if (epoch, step) == (0, 0):\n"
        f"                {on_each_rank('order')}            norm = nn.utils.get",
    ),
]


def most_kept(job, ranks):
    """Return how many microbatches each rank holds at most between forward and backward."""
    orders = [ast.literal_eval(said(job, rank)[0]) for rank in range(ranks)]
    return [max(accumulate(1 if kind == "F" else -1 for kind in order)) for order in orders]


def test_pipeline(tmp_path):
    """The weights of DDP, with 1F1B on four ranks and GPipe on two; two resume after four."""
    deep = ("layers = 2", "layers = 4")
    whole = ("ResumableSampler(train_set))", "ResumableSampler(train_set), drop_last=True)")
    solution = trained(tmp_path / "ddp", "solution", deep, whole, count=True)
    job = trained(tmp_path / "four", "pipeline", *IN_ORDER, count=True)
    assert most_kept(job, 4) == [4, 3, 2, 1]
    larger = ("batch_size = 4", "batch_size = 8")
    gpipe = ("pipeline = Schedule1F1B(", "pipeline = ScheduleGPipe(")
    two = trained(tmp_path / "two", "pipeline", *IN_ORDER, larger, gpipe, nprocs=2)
    assert most_kept(two, 2) == [MICROBATCHES] * 2
    for other in (job, two):
        assert numbers(other) == numbers(solution)
        ours, theirs = (saved(one)["model"] for one in (other, solution))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    held, calls = counted(job)
    sizes = [rank["parameters"] for rank in held]
    assert sum(sizes) == DEEP_PARAMETERS
    for rank in held:
        assert rank["parameters"] == rank["gradients"] == rank["optimizer"] / 2
    for rank, its_calls in enumerate(calls):
        neighbours = 1 if rank in (0, 3) else 2
        assert sent(its_calls, 4) == neighbours * BATCH * LENGTH * WIDTH + 1.5
    on_page("pipeline", 2 * DEEP_PARAMETERS, 2 * min(sizes), 2 * max(sizes))
    on_page("pipeline", sent(counted(solution)[1][0], 4), 2 * REAL_BATCH * LENGTH * WIDTH + 1.5)
    again = trained(tmp_path / "four", "pipeline", epochs=2, nprocs=2)
    assert "resuming from pipeline.pt after epoch 1\nepoch 2  loss " in again.stdout
    assert held_out(again) < held_out(job)
