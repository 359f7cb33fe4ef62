"""Recipes that split the exercise's GPT: who holds what, what is sent, and the same numbers."""

import re
import shutil
from itertools import pairwise

import pytest
import torch
from gpt import DOUBLE, counted, held_out, sent, small, trained
from support.jobs import run
from support.positions import writes_nothing_again
from support.results import losses, said
from support.scripts import digest, forked, on_each_rank, page

PARAMETERS = 117_479  # of the GPT
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The solution of the exercise on four ranks, in double precision."""
    return trained(tmp_path_factory.mktemp("ddp"), "solution", DOUBLE)


def bytes_on(name):
    """Return the numbers of bytes on a recipe's page."""
    text = page(f"recipes/{name}")
    return {int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", text)}


@SLOW
def test_zero_optimizer(ddp, tmp_path):
    """The same weights as DDP; resumed by two ranks, from what four ranks wrote."""
    job = trained(tmp_path / "four", "zero_optimizer", DOUBLE)
    assert losses(job) == losses(ddp)
    assert held_out(job) == held_out(ddp)
    (whole, *_), (calls, *_) = counted(ddp)
    held, (more_calls, *_) = counted(job)
    for rank in held:
        assert rank["parameters"] == rank["gradients"] == whole["parameters"]
    assert sum(rank["optimizer"] for rank in held) == whole["optimizer"] == 2 * PARAMETERS
    assert 4 * max(rank["optimizer"] for rank in held) in bytes_on("zero_optimizer")
    assert sent(more_calls, 4) == 1.5 * sent(calls, 4) == 1.5 * 2 * 0.75 * PARAMETERS
    assert {4 * sent(calls, 4), 4 * sent(more_calls, 4)} <= bytes_on("zero_optimizer")
    saved = tmp_path / "four" / "zero_optimizer.pt"
    ours, theirs = (torch.load(path)["model"] for path in (saved, ddp.cwd / "gpt.pt"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    without = tmp_path / "without"  # the recipe: the solution loads its checkpoint
    without.mkdir()
    shutil.copy(saved, without / "gpt.pt")
    plain = trained(without, "solution", DOUBLE, epochs=2, nprocs=2, counted=False)
    again = trained(tmp_path / "four", "zero_optimizer", DOUBLE, epochs=2, nprocs=2, counted=False)
    assert text_of(again) == text_of(plain)
    assert again.stdout.startswith("resuming from zero_optimizer.pt after epoch 1\nepoch 2  loss ")
    assert held_out(again) < held_out(job)


# ---------------------------------------------------------------- sharded parameters


@pytest.fixture(scope="module")
def resumed(ddp, tmp_path_factory):
    """The same for a second epoch, by two ranks."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copy(ddp.cwd / "gpt.pt", folder)
    return trained(folder, "solution", DOUBLE, epochs=2, nprocs=2, counted=False)


IN_DOUBLE = [
    DOUBLE,
    ("else None, torch.float32", "else None, torch.float64"),
    (".to(torch.float32, copy", ".to(torch.float64, copy"),
]


def text_of(job):
    """Return what a job printed, without its speed and the name of its checkpoint."""
    return re.sub(r"\S+ characters/s|\S+\.pt", "", job.stdout)


def check_held(held, name, copies=1):
    """Check that ranks hold all of it, in so many copies, and no more than the page says."""
    for what, states in {"parameters": 1, "gradients": 1, "optimizer": 2}.items():
        sizes = [rank[what] for rank in held]
        assert sum(sizes) == copies * states * PARAMETERS
        assert 4 * 2 // states * max(sizes) in bytes_on(name)  # parameters and gradients together


@SLOW
def test_fsdp2_gpt(ddp, resumed, tmp_path):
    """The same numbers as DDP, on four ranks and then on two; a crash in a save loses nothing."""
    job = trained(tmp_path, "fsdp2_gpt", *IN_DOUBLE)
    assert losses(job) == losses(ddp)
    assert held_out(job) == held_out(ddp)
    held, (calls, *_) = counted(job)
    check_held(held, "fsdp2_gpt")
    gathers = [call for call in calls if "all_gather" in call[0] or "_allgather_" in call[0]]
    others = [call for call in calls if call not in gathers]
    half = 2 * sent(gathers, 4) + 4 * sent(others, 4)  # if it gathers in bf16
    assert {4 * sent(calls, 4), half} <= bytes_on("fsdp2_gpt")

    kill = """        if (epochs_run, dist.get_rank()) == (2, 1):
            dcp.FileSystemWriter.write_data = lambda *_: signal.raise_signal(signal.SIGKILL)
"""
    kill = ("        dcp.save(", f"{kill}        dcp.save(")
    killed = small(tmp_path, "fsdp2_gpt", *IN_DOUBLE, kill, counted=False)
    assert run(forked(killed, "2"), tmp_path).returncode
    assert not (tmp_path / "fsdp2_gpt.pt.2-0" / ".metadata").exists()
    at_once = ("checkpoint = {}", "told_to_stop.fill_(1)\ncheckpoint = {}")
    writes_nothing_again(small(tmp_path, "fsdp2_gpt", *IN_DOUBLE, at_once, counted=False), "2")
    again = trained(tmp_path, "fsdp2_gpt", *IN_DOUBLE, epochs=2, nprocs=2, counted=False)
    assert text_of(again) == text_of(resumed)
    assert "after epoch 1\nepoch 2" in again.stdout


@SLOW
def test_fsdp2_gpt_in_bf16(tmp_path):
    """Parameters are gathered in bf16, and gradients summed in float32."""
    everywhere = ('torch.bfloat16 if device.type == "cuda" else None', "torch.bfloat16")
    calls = "{(e.name, e.input_dtypes[0]) for e in profiler.events() if '_base_' in e.name}"
    types = ("model.eval()\n", on_each_rank(f"sorted({calls})") + "model.eval()\n")
    few = [("numbers[:9_000]", "numbers[:2_100]"), ("write(model, 300)", "write(model, 3)")]
    job = trained(tmp_path, "fsdp2_gpt", everywhere, types, *few, nprocs=2)
    wanted = [("c10d::_allgather_base_", "c10::BFloat16"), ("c10d::_reduce_scatter_base_", "float")]
    assert f"rank 1: {wanted}" in job.stdout


@SLOW
def test_hybrid_sharding(ddp, resumed, tmp_path):
    """The same numbers as DDP, on two nodes and then on one; nodes exchange sums of gradients."""
    digests = digest("[p.to_local() for p in model.parameters()]")
    shards = ("model.eval()\n", on_each_rank(digests) + "model.eval()\n")
    job = trained(tmp_path, "hybrid_sharding", *IN_DOUBLE, shards)
    assert losses(job) == losses(ddp)
    assert held_out(job) == held_out(ddp)
    node, other = [[said(job, rank) for rank in ranks] for ranks in ((0, 1), (2, 3))]
    assert node == other
    assert node[0] != node[1]
    held, (calls, *_) = counted(job)
    check_held(held, "hybrid_sharding", copies=2)
    sums = [after[1][0] for before, after in pairwise(calls) if before[0] == "c10d::allreduce_"]
    *gradients, _ = sums  # the last is for the norm
    assert sum(gradients) == held[0]["gradients"]
    between = 4 * 2 * sum(gradients)  # from one node to the other, by its two ranks
    assert {4 * sent(calls, 2), between} <= bytes_on("hybrid_sharding")
    assert 4 * sent(counted(ddp)[1][0], 4) > between
    again = trained(tmp_path, "hybrid_sharding", *IN_DOUBLE, epochs=2, nprocs=2, counted=False)
    assert text_of(again) == text_of(resumed)


@SLOW
def test_local_sgd(ddp, tmp_path):
    """Ranks send their weights every few steps, and nothing else; they resume with all states."""
    exchange = "            synchronize()\n"
    profiled = f"""            with torch.profiler.profile(record_shapes=True) as exchanged:
                synchronize()
            calls = [(e.name, e.input_shapes) for e in exchanged.events() if "gloo:" in e.name]
            sizes = [t.numel() for t in (common, common.grad, *outer.state[common].values())]
            {on_each_rank("calls, sizes")}"""
    loop, end = "for epoch in range(epochs_run, epochs):\n", "model.eval()\n"
    state = on_each_rank(digest("[t for s in outer.state.values() for t in s.values()]"))
    weights = on_each_rank(digest("model.parameters()"))
    changes = [DOUBLE, ("period = 10", "period = 5"), (loop, state + loop)]
    changes += [(end, state + weights + end), (exchange, profiled)]
    job = trained(tmp_path, "local_sgd", *changes)
    (whole, *_), (ddp_calls, *_) = counted(ddp)
    held, (calls, *_) = counted(job)
    assert held == [whole] * 4
    assert calls == []
    said_by = [said(job, rank) for rank in range(4)]
    assert said_by == [said_by[0]] * 4  # the weights, too
    _, counts, saved, _ = said_by[0]
    assert counts == f"([('gloo:all_reduce', [[{PARAMETERS}]])], {[PARAMETERS] * 3})"
    assert {4 * 3 * PARAMETERS, 4 * (whole["parameters"] + whole["gradients"])} <= bytes_on(
        "local_sgd"
    )
    assert 4 * sent(ddp_calls, 4) in bytes_on("local_sgd")  # each time
    again = trained(tmp_path, "local_sgd", *changes, epochs=2, nprocs=2, counted=False)
    loaded, *_ = said(again, 1)
    assert loaded == saved
    assert "after epoch 1\nepoch 2" in re.sub(r"rank .*\n", "", again.stdout)
    assert held_out(again) < held_out(job)


@SLOW
def test_local_sgd_in_each_step(tmp_path):
    """With SGD, the mean in each step, and no clipping, the numbers are those of DDP."""
    inner = [("torch.optim.AdamW(", "torch.optim.SGD("), ("lr = 5e-3", "lr = 0.5")]
    free = ("model.parameters(), 1.0)", "model.parameters(), math.inf)")
    mean = ("lr=0.7, momentum=0.5, nesterov=True", "lr=1")
    jobs = [
        trained(tmp_path / name, name, DOUBLE, *inner, free, *changes, counted=False)
        for name, *changes in (("solution",), ("local_sgd", ("period = 10", "period = 1"), mean))
    ]
    assert text_of(jobs[0]) == text_of(jobs[1])
