"""Recipes about models: sharded, compared across ranks, several at once, frozen, and exported."""

import re
import shutil

import pytest
import torch
from patching import page
from running import (
    AT_ONCE,
    HOOKED,
    IMPATIENT,
    ONE,
    SENT,
    TRAIN,
    difference,
    printed,
    ran,
    refused,
    said_at_the_end,
    same,
    saved,
    script,
    stopped,
    told,
    with_and_without_a_stop,
    writes_nothing_again,
)
from support import server
from support.jobs import finished, run
from support.positions import BATCH
from support.results import accuracy, epochs, losses, resumed, said, same_bits, weights
from support.scripts import DOUBLE, LONG, digest, forked, on_each_rank
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.slow
UNEVEN = ("2", "--batch-size=179", "--width=4")  # 359 = 180 + 179: two batches, and one
STOP = 10 * 179 * 2  # samples of epoch 2: at step 10 the ranks ask whether to stop

# ---------------------------------------------------------------- sharded models

PARAMETERS = 4074  # of the model with width 4
# Each rank prints how many bytes of parameters, gradients and optimizer state it holds.
EVALUATED = "    if not trainer.interrupted:\n"
HELD = "[*model.parameters(), *(parameter.grad for parameter in model.parameters()), "
HELD += "*(t for state in optimizer.state.values() for t in state.values() if t.dim() > 0)]"
HELD = on_each_rank(f"sum(getattr(tensor, '_local_tensor', tensor).nbytes for tensor in {HELD})")
HELD = (EVALUATED, f"    {HELD}{EVALUATED}")
# Rank 0 saves the whole state that was loaded.
LOADED = (
    TRAIN,
    f"""    from torch.distributed.checkpoint import state_dict as states
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    loaded = states.get_state_dict(trainer.model, optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save(loaded, "loaded.pt")
{TRAIN}""",
)
SAMPLES = ("        speed = ", '        log(f"{samples:.0f} samples")\n        speed = ')
# No rank ever holds the whole model: each allocates its shards, then loads them.
META = (
    (
        "    model = build_model(args.width).to(device)\n",
        '    with torch.device("meta"):\n        model = build_model(args.width)\n',
    ),
    ("    optimizer = ", "    model.to_empty(device=device)\n    optimizer = "),
)


@pytest.fixture
def ddp(trained_with):
    """Step 5 in double precision."""
    return trained_with("05", (*DOUBLE, HELD), UNEVEN)


def test_fsdp2(ddp, tmp_path):
    """The same weights as DDP, half on each rank; saved, and resumed by two ranks and by four."""
    job = ran(tmp_path, "fsdp2", *DOUBLE, HELD, args=UNEVEN)
    assert difference(job, ddp) < 1e-9
    assert accuracy(job) == accuracy(ddp)
    held = 8 * 4 * PARAMETERS  # float64 parameters, gradients, and two optimizer states
    assert [said(ddp, rank) for rank in (0, 1)] == [[f"{held}"]] * 2
    assert [said(job, rank) for rank in (0, 1)] == [[f"{held // 2}"]] * 2
    two, four = tmp_path / "two", tmp_path / "four"
    stopped(script(two, "fsdp2", *DOUBLE, told(1, STOP - 179 * 2)), *UNEVEN, samples=STOP)
    shutil.copytree(two, four)
    assert same_bits(ran(two, "fsdp2", *DOUBLE, args=UNEVEN), job)
    checkpoint = torch.load(four / "checkpoint.pt", weights_only=True)
    job = ran(four, "fsdp2", *DOUBLE, *META, LOADED, SAMPLES, args=UNEVEN, nprocs=4)
    assert resumed(job) == [1]
    assert printed(r"(\d+) samples", job) == ["9364"]  # 12942 - 3580, and two of padding
    assert accuracy(job)[2] == 359
    model, optimizer = torch.load(four / "loaded.pt", weights_only=True)
    assert same(model, checkpoint["MODEL_STATE"])
    assert same(optimizer, checkpoint["OPTIMIZER_STATE"])


def test_fsdp2_wants_contiguous_parameters(tmp_path):
    last = ("(device)\n    for", "(device, memory_format=torch.channels_last)\n    for")
    refused(tmp_path, "fsdp2", last)


def last_folder(folder):
    """Return the folder that the checkpoint in a job's folder names."""
    return folder / torch.load(folder / "checkpoint.pt", weights_only=True)["FOLDER"]


def converted(folder):
    """Return the whole state in a sharded checkpoint."""
    dcp_to_torch_save(last_folder(folder), folder / "converted.pt")
    return torch.load(folder / "converted.pt", weights_only=True)


def test_sharded_checkpoint(ddp, tmp_path):
    """Each rank writes a part; a crash during the save leaves the last checkpoint intact."""
    killed = """            if (self.epochs_run, dist.get_rank()) == (2, 1):
                dcp.FileSystemWriter.write_data = lambda *_: signal.raise_signal(signal.SIGKILL)
"""
    kill = ("            dcp.save(", f"{killed}            dcp.save(")
    run(forked(script(tmp_path, "sharded_checkpoint", *DOUBLE, kill), *UNEVEN), tmp_path)
    broken = tmp_path / "checkpoint.pt.2-0"
    assert broken.exists()
    assert not (broken / ".metadata").exists()
    writes_nothing_again(script(tmp_path, "sharded_checkpoint", *DOUBLE, AT_ONCE), *UNEVEN)
    assert resumed(ran(tmp_path, "sharded_checkpoint", *DOUBLE, args=UNEVEN)) == [1]
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in broken.iterdir()}
    assert same(converted(tmp_path)["model_state_dict"], weights(ddp))


# Rank 1 writes its part only when the next epoch is under way; of epoch 2, it is killed instead.
SAVE = "            written = dcp.async_save("
LATE = [
    (
        SAVE,
        f"""\
            if dist.get_rank() == 1:
                epoch, write = self.epochs_run, dcp.FileSystemWriter.write_data

                def late(*args):
                    dcp.FileSystemWriter.write_data = write
                    while self.position < (epoch, 20):
                        time.sleep(0.01)
                    if epoch == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return write(*args)

                dcp.FileSystemWriter.write_data = late
{SAVE}""",
    ),
    (BATCH, f"{BATCH}            self.position = self.epochs_run, step\n"),
]
# The last write takes longer than the evaluation after it.
LONG_WRITE = (
    SAVE,
    f"""\
            if self.epochs_run == 4:
                write = dcp.FileSystemWriter.write_data
                dcp.FileSystemWriter.write_data = lambda *args: time.sleep(3) or write(*args)
{SAVE}""",
)


def test_async_checkpoint(tmp_path, trained):
    """Training continues during a save; a rank that is killed then leaves the checkpoint before."""
    name = "async_checkpoint"
    killed = run(forked(script(tmp_path, name, *LATE), *LONG), tmp_path)
    assert killed.returncode == 1, killed
    assert last_folder(tmp_path).name == "checkpoint.pt.1-0"
    assert not (tmp_path / "checkpoint.pt.2-0" / ".metadata").exists()
    writes_nothing_again(script(tmp_path, name, AT_ONCE), *LONG)
    assert resumed(stopped(script(tmp_path, name, told(2)), *LONG)) == [1]
    job = ran(tmp_path, name, LONG_WRITE, args=LONG)
    assert resumed(job) == [2]
    assert last_folder(tmp_path).name == "checkpoint.pt.4-0"
    assert same(converted(tmp_path)["model_state_dict"], weights(trained("05", *LONG)))


def test_async_checkpoint_in_the_group_of_training(tmp_path):
    """While rank 1 has yet to write, rank 0 calls the next collective of the save."""
    shared = (", process_group=self.saving_group", "")
    path = script(tmp_path, "async_checkpoint", *LATE, shared, IMPATIENT)
    job = run(forked(path, *LONG), tmp_path)
    assert job.returncode == 1, job
    assert re.search("Timed out waiting|Application timeout", job.stderr), job
    assert epochs(job) == [1]
    assert not (tmp_path / "checkpoint.pt").exists()


# ---------------------------------------------------------------- losses and models

# As with `dist.all_gather`, only a rank's own samples have a gradient.
PLAIN = (
    "    everyone = AllGather.apply(nn.functional.normalize(other))\n",
    """    local = nn.functional.normalize(other)
    everyone = list(AllGather.apply(local.detach()).chunk(dist.get_world_size()))
    everyone[dist.get_rank()] = local
    everyone = torch.cat(everyone)
""",
)


def test_contrastive(tmp_path):
    """Two ranks take the same steps as one with the whole batch, but not without the gradients."""
    one, two, plain = (
        ran(
            tmp_path / folder,
            "contrastive",
            *(*DOUBLE, *changes),
            args=("1", f"--batch-size={256 // nprocs}", "--width=2"),
            nprocs=nprocs,
        )
        for folder, nprocs, *changes in (("one", 1), ("two", 2), ("plain", 2, PLAIN))
    )
    assert difference(one, two) < 1e-9
    assert difference(one, plain) > 1e-3
    assert losses(one) == losses(two)


def test_gan(tmp_path):
    """Both models are the same on all ranks; a mid-epoch resume is bit-for-bit identical."""
    models = "[*trainer.model.parameters(), *trainer.generator.parameters()]"
    jobs = with_and_without_a_stop(tmp_path, "gan", said_at_the_end(digest(models)))
    for job in jobs:
        assert said(job, 0)[-1:] == said(job, 1)[-1:]
    for name in "GENERATOR_STATE", "OPTIMIZER_G_STATE":
        assert same(*(saved(job, name) for job in jobs))


FREEZE = "    model[:5].requires_grad_(False)"
LATER = [(FREEZE, "    #"), (TRAIN, f"    trainer.model.module{FREEZE[9:]}\n{TRAIN}")]


def test_frozen_layers(trained, tmp_path):
    """Layers frozen before DDP do not change and are not reduced; frozen later, DDP waits."""
    pretrained = trained("05", *ONE)
    shutil.copy(pretrained.cwd / "checkpoint.pt", tmp_path / "pretrained.pt")
    refused(tmp_path, "frozen_layers", *LATER)
    sizes = said_at_the_end("{size for _, size in SENT if size > 2}")
    job = ran(tmp_path, "frozen_layers", SENT, (TRAIN, HOOKED), sizes)
    before, after = weights(pretrained), weights(job)
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"0.weight", "0.bias", "2.weight", "2.bias"}
    trainable = sum(tensor.numel() for name, tensor in after.items() if name not in kept)
    assert said(job, 0) == [str({trainable})]
    assert len(saved(job, "OPTIMIZER_STATE")["state"]) == 4


def test_compressed_gradients(trained, tmp_path):
    """All gradients are sent with two bytes each; the ranks still have the same weights."""
    types = f"{{kind for kind, size in SENT if size == {PARAMETERS}}}"
    shown = said_at_the_end(f"{types}, {digest('model.parameters()')}")
    job = ran(tmp_path, "compressed_gradients", SENT, shown)
    assert said(job, 0) == said(job, 1)
    assert said(job, 0)[0].startswith("({'torch.float16'}, ")
    step_5 = trained("05", *ONE)
    assert not same_bits(job, step_5)
    assert float(losses(job)[0]) == pytest.approx(float(losses(step_5)[0]), abs=0.02)
    bfloat16 = ("import fp16_", "import bf16_compress_hook as fp16_")
    refused(tmp_path / "bfloat16", "compressed_gradients", bfloat16)


def test_export(tmp_path):
    """The page's code reads the file without a process group, and gets the same accuracy."""
    job = ran(tmp_path, "export")
    shutil.move(tmp_path / "05_gather_eval.py", tmp_path / "export.py")
    pattern = "^```python\n(.*?)^```$"
    [code] = re.findall(pattern, page("recipes/export"), re.MULTILINE | re.DOTALL)
    (tmp_path / "read.py").write_text(code, encoding="utf-8")
    reader = finished(server.command(tmp_path / "read.py"), tmp_path)
    _, correct, total = accuracy(job)
    assert reader.stdout == f"{correct} of {total}\n"
