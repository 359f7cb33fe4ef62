"""Recipes that split the exercise's GPT: who holds what, and the numbers of DDP."""

import shutil

import pytest
import torch
from gpt import held, held_out, on_page, small, trained
from running import same, writes_nothing_again
from support.jobs import run
from support.results import losses, said
from support.scripts import digest, forked, on_each_rank

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpt")]  # which shares its fixtures
PARAMETERS, DEEP_PARAMETERS = 117_479, 217_447  # of the GPT, with two layers and with four
END = "model.eval()\n"


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """The solution of the exercise on four ranks, in double precision."""
    return trained(tmp_path_factory.mktemp("ddp"), "solution")


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
    job = trained(folder, name, *changes)
    assert numbers(job) == numbers(ddp)
    again = trained(folder, name, epochs=2, nprocs=2)
    assert f"resuming from {name}.pt after epoch 1\nepoch 2" in again.stdout
    assert numbers(again) == numbers(resumed)
    return job


def holds(name, job, copies=1):
    """Check that ranks hold all of it, in so many copies, and no more than the page says."""
    sizes = [parameters for parameters, _, _ in held(job)]
    assert sum(sizes) == copies * PARAMETERS
    assert held(job) == [[size, size, 2 * size] for size in sizes]
    on_page(name, 2 * max(sizes))  # parameters and gradients together, and the optimizer's state


def test_zero_optimizer(ddp, resumed, tmp_path):
    """The same weights and the same checkpoint as DDP."""
    job = trained(tmp_path, "zero_optimizer")
    assert numbers(job) == numbers(ddp)
    assert same(saved(job), saved(ddp))
    assert held(ddp) == [[PARAMETERS, PARAMETERS, 2 * PARAMETERS]] * 4
    assert [rank[:2] for rank in held(job)] == [[PARAMETERS, PARAMETERS]] * 4
    states = [state for _, _, state in held(job)]
    assert sum(states) == 2 * PARAMETERS
    on_page("zero_optimizer", 2 * PARAMETERS, max(states))
    again = trained(tmp_path, "zero_optimizer", epochs=2, nprocs=2)
    assert numbers(again) == numbers(resumed)


def test_fsdp2_gpt(ddp, resumed, tmp_path):
    """The numbers of DDP, on four ranks and then on two; a crash in a save loses nothing."""
    job = trained(tmp_path, "fsdp2_gpt")
    assert numbers(job) == numbers(ddp)
    holds("fsdp2_gpt", job)
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
    call = "interrupted = train(model, samples_run)\n"
    calls = "{(e.name, e.input_dtypes[0]) for e in profiler.events() if '_base_' in e.name}"
    profiled = f"""with torch.profiler.profile(record_shapes=True) as profiler:
    {call}{on_each_rank(f"sorted({calls})")}"""
    job = trained(tmp_path, "fsdp2_gpt", everywhere, (call, profiled), nprocs=2, double=False)
    wanted = [("c10d::_allgather_base_", "c10::BFloat16"), ("c10d::_reduce_scatter_base_", "float")]
    assert f"rank 1: {wanted}" in job.stdout


def test_hybrid_sharding(ddp, resumed, tmp_path):
    """Two nodes hold the same shards."""
    digests = digest("[p.to_local() for p in model.parameters()]")
    shards = (END, on_each_rank(digests) + END)
    job = trains_like(ddp, resumed, tmp_path, "hybrid_sharding", shards)
    node, other = [[said(job, rank)[-1] for rank in ranks] for ranks in ((0, 1), (2, 3))]
    assert node == other
    assert node[0] != node[1]
    holds("hybrid_sharding", job, copies=2)


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
    job = trained(tmp_path, "local_sgd", *changes, *ends)
    first, *others = [said(job, rank) for rank in range(4)]
    assert others == [first] * 3  # the weights, too
    counts, final, _ = (text for text in first[1:] if "held" not in text)
    assert counts == f"([('gloo:all_reduce', [[{PARAMETERS}]])], {[PARAMETERS] * 3})"
    again = trained(tmp_path, "local_sgd", (call, state + call), epochs=2, nprocs=2)
    assert said(again, 1)[0] == final  # what it loads
    assert held_out(again) < held_out(job)
    assert held(job) == held(ddp)
    on_page("local_sgd", 3 * PARAMETERS, 2 * PARAMETERS)


@pytest.mark.parametrize("name", ["tensor_parallel", "two_dimensional"])
def test_splits_each_layer(ddp, resumed, tmp_path, name):
    """All ranks write the same text."""
    write_it = "    log(write(model, 5))"
    on_all = (write_it, f"    {on_each_rank('write(model, 5)').rstrip()}")
    job = trains_like(ddp, resumed, tmp_path, name, on_all)
    assert len({text for rank in range(4) for text in said(job, rank)[-1:]}) == 1
    sizes = [parameters for parameters, _, _ in held(job)]
    assert held(job) == [[size, size, 2 * size] for size in sizes]
    assert PARAMETERS <= sum(sizes) < 1.05 * PARAMETERS  # with copies of the norms
    on_page(name, 2 * max(sizes))


def test_pipeline(tmp_path):
    """The weights of DDP, on four ranks and on two; two resume after four."""
    deep = ("layers = 2", "layers = 4")
    whole = ("ResumableSampler(train_set))", "ResumableSampler(train_set), drop_last=True)")
    solution = trained(tmp_path / "ddp", "solution", deep, whole)
    job = trained(tmp_path / "four", "pipeline")
    gpipe = ("pipeline = Schedule1F1B(", "pipeline = ScheduleGPipe(")
    larger = ("batch_size = 4", "batch_size = 8")
    two = trained(tmp_path / "two", "pipeline", gpipe, larger, nprocs=2)
    for other in (job, two):
        assert numbers(other) == numbers(solution)
        ours, theirs = (saved(one)["model"] for one in (other, solution))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    sizes = [parameters for parameters, _, _ in held(job)]
    assert sum(sizes) == DEEP_PARAMETERS
    assert held(job) == [[size, size, 2 * size] for size in sizes]
    on_page("pipeline", 2 * DEEP_PARAMETERS, 2 * min(sizes), 2 * max(sizes))
    again = trained(tmp_path / "four", "pipeline", epochs=2, nprocs=2)
    assert "resuming from pipeline.pt after epoch 1\nepoch 2  loss " in again.stdout
    assert held_out(again) < held_out(job)
