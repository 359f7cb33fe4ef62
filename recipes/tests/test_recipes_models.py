"""Recipes about models: sharded, compared across ranks, several at once, frozen, and exported."""

import re
import shutil

import pytest
import torch
from changes import AT_ONCE, IMPATIENT, PROFILED, SENT, said_at_the_end, stop_on_rank_1
from running import FEW, ONE, Patched, same, same_but_for_rounding, saved, writes_nothing_again
from support.results import accuracy, epochs, losses, resumed, said, same_bits, weights
from support.scripts import DOUBLE, LONG, digest
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


SAVE = "            written = dcp.async_save("
LATE = (
    SAVE,
    f"""\
            def late(*args, write=dcp.FileSystemWriter.write_data):
                while self.samples_run < 20 * 128:  # until the next epoch is under way
                    time.sleep(0.01)
                if self.epochs_run == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(*args)

            if dist.get_rank() == 1:
                dcp.FileSystemWriter.write_data = late
{SAVE}""",
)
KILLED = """\
            if (self.epochs_run, dist.get_rank()) == (2, 1):
                dcp.FileSystemWriter.write_data = lambda *_: signal.raise_signal(signal.SIGKILL)
            dcp.save("""
# The last write takes longer than the evaluation after it.
LONG_WRITE = f"""\
            if self.epochs_run == 4:
                write = dcp.FileSystemWriter.write_data
                dcp.FileSystemWriter.write_data = lambda *args: time.sleep(3) or write(*args)
{SAVE}"""
CRASHES = {  # how a rank is killed in the second save, and what slows the last one down
    "sharded_checkpoint": (("            dcp.save(", KILLED), []),
    "async_checkpoint": (LATE, [(SAVE, LONG_WRITE)]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_in_a_save_leaves_the_last_checkpoint(tmp_path, trained, name):
    """A rank is killed while it writes its part; later, the ranks are told to stop."""
    recipe, (killed, slow) = Patched(f"recipes/{name}", tmp_path), CRASHES[name]
    job = recipe.ran(killed, args=LONG, code=1)
    assert saved(job)["FOLDER"] == "checkpoint.pt.1-0"
    assert not (tmp_path / "checkpoint.pt.2-0" / ".metadata").exists()
    writes_nothing_again(recipe.script(AT_ONCE), *LONG)
    assert resumed(recipe.stopped(stop_on_rank_1(2), args=LONG)) == [1]
    job = recipe.ran(*slow, args=LONG)
    assert resumed(job) == [2]
    assert saved(job)["FOLDER"] == "checkpoint.pt.4-0"
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in tmp_path.glob("*.4-0/*")}
    dcp_to_torch_save(tmp_path / "checkpoint.pt.4-0", tmp_path / "converted.pt")
    whole = saved(job, "converted.pt")["model_state_dict"]
    assert same(whole, weights(trained("05", *LONG)))


def test_async_checkpoint_in_the_group_of_training(recipe):
    """While rank 1 has yet to write, rank 0 calls the next collective of the save."""
    shared = (", process_group=self.saving_group", "")
    job = recipe.ran(LATE, shared, IMPATIENT, args=LONG, code=1)
    assert re.search("Timed out waiting|Application timeout", job.stderr), job
    assert epochs(job) == [1]
    assert not (recipe.folder / "checkpoint.pt").exists()


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
def test_gan(recipe):
    """Both models are the same on all ranks; a mid-epoch resume is bit-for-bit identical."""
    models = digest("[*trainer.model.parameters(), *trainer.generator.parameters()]")
    for job in recipe.with_and_without_a_stop(said_at_the_end(models)):
        assert said(job, 0)[-1:] == said(job, 1)[-1:] != []


@pytest.mark.gpu
def test_frozen_layers(recipe, trained):
    """Layers that are frozen before DDP do not change, and are not reduced."""
    pretrained = trained("05", *ONE)
    shutil.copy(pretrained.cwd / "checkpoint.pt", recipe.folder / "pretrained.pt")
    sizes = f"{{shape[0] for kind, shape in {SENT} if kind == 'float'}}"
    job = recipe.ran(PROFILED, said_at_the_end(sizes), args=FEW)
    before, after = weights(pretrained), weights(job)
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"0.weight", "0.bias", "2.weight", "2.bias"}
    trainable = sum(tensor.numel() for name, tensor in after.items() if name not in kept)
    assert said(job, 0) == [str({trainable})]
    assert len(saved(job)["OPTIMIZER_STATE"]["state"]) == 4


@pytest.mark.gpu
def test_compressed_gradients(recipe, trained):
    """All gradients are sent with two bytes each; the ranks still have the same weights."""
    types = f"{{kind for kind, shape in {SENT} if shape == [4074]}}"  # all parameters
    shown = said_at_the_end(f"{types}, {digest('model.parameters()')}")
    job = recipe.ran(PROFILED, shown, args=FEW)
    assert said(job, 0) == said(job, 1)
    assert said(job, 0)[0].startswith("({'c10::Half'}, ")
    step_5 = trained("05", *FEW)
    assert float(losses(job)[0]) == pytest.approx(float(losses(step_5)[0]), abs=0.02)
