"""Recipes about models: sharded, compared across ranks, frozen, and recomputed in backward."""

import shutil

import pytest
import torch
from changes import AT_ONCE, PROFILED, SENT, STEPS, TRAINED, printed_at_the_end, stop_on_rank_1
from running import FEW, ONE, same, same_but_for_rounding, saved
from support.results import accuracy, losses, printed_by, resumed, same_bits, weights
from support.scripts import DOUBLE, LONG
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.slow
UNEVEN = ("2", "--batch-size=179", "--width=4")  # 359 = 180 + 179: two batches, and one
MODEL = "    model = build_model(args.width).to(device)\n"
META = [  # no rank ever holds the whole model: each allocates its shards, then loads them
    (MODEL, '    with torch.device("meta"):\n        model = build_model(args.width)\n'),
    ("    optimizer = ", "    model.to_empty(device=device)\n    optimizer = "),
]


@pytest.mark.gpu
def test_fsdp2(recipe, trained_with):
    """The same weights as DDP; two ranks resume, and four load the same."""
    job, ddp = recipe.ran(*DOUBLE, args=UNEVEN), trained_with("05", (*DOUBLE,), UNEVEN)
    same_but_for_rounding(job, ddp)
    assert accuracy(job) == accuracy(ddp)
    two, four = recipe.at("two"), recipe.at("four")
    stop = 10 * 179 * 2  # samples of epoch 2: at step 10 the ranks ask whether to stop
    last = two.stopped(*DOUBLE, stop_on_rank_1(1, stop - 179 * 2), args=UNEVEN, samples=stop)
    shutil.copytree(two.folder, four.folder, dirs_exist_ok=True)
    again = four.stopped(*DOUBLE, *META, AT_ONCE, args=UNEVEN, samples=stop, nprocs=4)
    assert same(saved(again), saved(last))
    assert same_bits(two.ran(*DOUBLE, args=UNEVEN), job)


KILLED = (
    "            dcp.save(",
    """\
            if (self.epochs_run, dist.get_rank()) == (2, 1):
                dcp.FileSystemWriter.write_data = lambda *_: signal.raise_signal(signal.SIGKILL)
            dcp.save(""",
)


@pytest.mark.gpu
def test_sharded_checkpoint(recipe, trained):
    """A rank is killed while it writes its part of a checkpoint; the one before is intact.

    A checkpoint that has already been saved is not written again.
    """
    job = recipe.ran(KILLED, args=LONG, code=1)
    assert saved(job)["FOLDER"] == "checkpoint.pt.1-0"
    assert not (job.cwd / "checkpoint.pt.2-0" / ".metadata").exists()
    before = {file: file.stat().st_mtime_ns for file in job.cwd.glob("*/*.distcp")}
    recipe.stopped(AT_ONCE, args=LONG, samples=0)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert resumed(recipe.stopped(stop_on_rank_1(2), args=LONG)) == [1]
    job = recipe.ran(args=LONG)
    assert resumed(job) == [2]
    assert saved(job)["FOLDER"] == "checkpoint.pt.4-0"
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in job.cwd.glob("*.4-0/*")}
    dcp_to_torch_save(job.cwd / "checkpoint.pt.4-0", job.cwd / "converted.pt")
    whole = saved(job, "converted.pt")["model_state_dict"]
    assert same(whole, weights(trained("05", *LONG)))


@pytest.mark.gpu
def test_contrastive(recipe):
    """Two ranks take the same steps as one with the whole batch, but not without the gradients."""
    one = recipe.ran(*DOUBLE, args=("1", "--batch-size=256", "--width=2"), nprocs=1)
    args = ("1", "--batch-size=128", "--width=2")
    two = recipe.at("two").ran(*DOUBLE, args=args)
    same_but_for_rounding(one, two)
    assert losses(one) == losses(two)
    own = ("        dist.all_reduce(gradient)", "        pass")  # only the own loss's gradient
    assert losses(recipe.at("own").ran(*DOUBLE, own, args=args)) != losses(one)


@pytest.mark.gpu
def test_frozen_layers(recipe, trained):
    """Layers that are frozen before DDP do not change, and are not reduced."""
    pretrained = trained("05", *ONE)
    shutil.copy(pretrained.cwd / "checkpoint.pt", recipe.folder / "pretrained.pt")
    sizes = f"{{shape[0] for kind, shape in {SENT} if kind == 'float'}}"
    job = recipe.ran(PROFILED, printed_at_the_end(sizes), args=FEW)
    before, after = weights(pretrained), weights(job)
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"0.weight", "0.bias", "2.weight", "2.bias"}
    trainable = sum(tensor.numel() for name, tensor in after.items() if name not in kept)
    assert printed_by(job, 0) == [str({trainable})]


@pytest.mark.gpu
def test_activation_checkpointing(recipe, trained):
    """The bits of step 5, although each step calls the first layer twice."""
    hook = "    model[0].register_forward_hook(lambda *_: calls.append(1))\n"
    counted = (MODEL, f"{MODEL}    calls = []\n{hook}")
    job = recipe.ran(counted, printed_at_the_end("len(calls)", TRAINED))
    assert printed_by(job, 0) == [f"{2 * STEPS}"]
    assert same_bits(job, trained("05", *ONE))
