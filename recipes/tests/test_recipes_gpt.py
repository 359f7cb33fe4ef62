"""Recipes that split the exercise's GPT: who holds what, and the numbers of DDP."""

import shutil
from functools import cache

import pytest
from changes import EVENTS
from gpt import held, held_out, on_page, small, trained
from running import same, saved, writes_nothing_again
from support.results import losses, said
from support.scripts import digest, on_each_rank

# All in one process, which shares their fixture.
pytestmark = [pytest.mark.slow, pytest.mark.gpu, pytest.mark.xdist_group("gpt")]
PARAMETERS = 117_479  # of the GPT
END = "model.eval()\n"
SHARDS = digest("[getattr(p, '_local_tensor', p) for p in model.parameters()]")
COPIES = {  # of the parameters and of the optimizer's state, on all four ranks together
    "zero_optimizer": (4, 1),
    "fsdp2_gpt": (1, 1),
    "hybrid_sharding": (2, 2),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the Results of an epoch on four ranks, and of the next one on two."""

    @cache
    def train(name):
        shards = (END, on_each_rank(SHARDS) + END)
        job = trained(tmp_path_factory.mktemp(name), name, shards)
        again = shutil.copytree(job.cwd, tmp_path_factory.mktemp(name) / "again")
        return job, trained(again, name, epochs=2, nprocs=2)

    return train


def numbers(job):
    """Return the losses that a job printed."""
    return losses(job), held_out(job)


@pytest.mark.parametrize("name", COPIES)
def test_trains_like_ddp(runs, name):
    """The losses are those of DDP, and a rank holds no more than the page says."""
    job, again = runs(name)
    assert [numbers(job), numbers(again)] == [numbers(other) for other in runs("solution")]
    assert f"resuming from {name}.pt after epoch 1\nepoch 2" in again.stdout
    assert len({said(job, rank)[-1] for rank in range(4)}) == 1  # the text, or the weights
    parameters, gradients, states = zip(*held(job))
    assert parameters == gradients
    ours, theirs = (PARAMETERS * copies for copies in COPIES[name])
    assert ours <= sum(parameters) < 1.05 * ours  # with copies of the norms
    assert theirs <= sum(states) / 2 < 1.05 * theirs
    on_page(name, 2 * max(parameters), max(states))


def test_zero_optimizer(runs):
    """The same checkpoint as DDP, of which each rank holds all of the optimizer's state."""
    (job, _), (ddp, _) = runs("zero_optimizer"), runs("solution")
    assert same(saved(job, "zero_optimizer.pt"), saved(ddp, "gpt.pt"))
    assert held(ddp) == [[PARAMETERS, PARAMETERS, 2 * PARAMETERS]] * 4


def test_hybrid_sharding(runs, tmp_path):
    """Two nodes hold the same shards; ranks that do not fill a node are refused."""
    shards = [said(runs("hybrid_sharding")[0], rank)[-2] for rank in range(4)]
    assert shards[:2] == shards[2:]
    assert shards[0] != shards[1]
    with pytest.raises(AssertionError, match="ValueError: the ranks do not fill nodes"):
        trained(tmp_path, "hybrid_sharding", nprocs=1)


def test_fsdp2_gpt(runs, tmp_path):
    """A save that is there already is not written again."""
    job, again = runs("fsdp2_gpt")
    shutil.copytree(job.cwd, tmp_path, dirs_exist_ok=True)
    at_once = ("checkpoint = {}", "stop_signals.append(signal.SIGTERM)\ncheckpoint = {}")
    writes_nothing_again(small(tmp_path, "fsdp2_gpt", at_once), "2")
    ahead = "model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])\n"
    prefetched = ("optimizer = torch", f"{ahead}optimizer = torch")  # gathers earlier, no more
    job = trained(tmp_path, "fsdp2_gpt", prefetched, epochs=2, nprocs=2)
    assert numbers(job) == numbers(again)


def test_fsdp2_gpt_in_bf16(tmp_path):
    """Parameters are gathered in bf16, and gradients summed in float32."""
    everywhere = ('torch.bfloat16 if device.type == "cuda" else None', "torch.bfloat16")
    call = "interrupted = train(model, samples_run)\n"
    sent = "'_base_' in e.name() and e.dtypes()"
    calls = f"{{(e.name(), e.dtypes()[0]) for e in {EVENTS} if {sent}}}"
    profiled = f"""with torch.profiler.profile(record_shapes=True) as profiler:
    {call}{on_each_rank(f"sorted({calls})")}"""
    job = trained(tmp_path, "fsdp2_gpt", everywhere, (call, profiled), nprocs=2, double=False)
    wanted = [("c10d::_allgather_base_", "c10::BFloat16"), ("c10d::_reduce_scatter_base_", "float")]
    assert f"rank 1: {wanted}" in job.stdout
