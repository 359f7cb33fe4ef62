"""Recipes about models: sharded, compared across ranks, several at once, frozen, and exported."""

import re
import shutil

import pytest
import torch
from support import server
from support.jobs import finished, run
from support.positions import AT_ONCE, BATCH, stopped, told, writes_nothing_again
from support.results import accuracy, error_lines, losses, resumed, same_bits, weights
from support.scripts import DOUBLE, SMALL, forked, on_screen, page, patched
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SLOW = pytest.mark.slow
TRAIN = "    trainer.train("
BARRIER = "    dist.barrier()"
ONE = ("1", *SMALL)
UNEVEN = ("2", "--batch-size=179", "--width=4")  # 359 = 180 + 179: two batches, and one
STOP = 10 * 179 * 2  # samples of epoch 2: at step 10 the ranks ask whether to stop

# Rank 0 prints how many different sets of weights the ranks end with.
COMPARED = (
    BARRIER,
    """    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str([p.tolist() for p in trainer.model.parameters()]))
    log(f"kinds of weights: {len(set(everyone))}")
"""
    + BARRIER,
)


def told_to_stop(folder, recipe, *changes):
    """Run a recipe that is told to stop in epoch 2."""
    folder.mkdir()
    told_at = told(1, STOP - 179 * 2)
    stopped(patched(folder, recipe, *changes, told_at), *UNEVEN, samples=STOP)
    assert (folder / "checkpoint.pt.interrupted").exists()


def started_again(folder, recipe, *changes, nprocs=2):
    """Resume a recipe after epoch 1; return the Result."""
    job = finished(forked(patched(folder, recipe, *changes), *UNEVEN, nprocs=nprocs), folder)
    assert resumed(job) == [1]
    assert not (folder / "checkpoint.pt.interrupted").exists()
    return job


def printed(pattern, job):
    return re.findall(f"^{pattern}$", job.stdout, re.MULTILINE)


def difference(a, b):
    """Return the largest difference between the weights of two jobs."""
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max() for name in a)


def same(a, b):
    """Return whether two states, nested dicts of tensors, are bit-for-bit identical."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):  # optimizers return betas as either
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


# ---------------------------------------------------------------- sharded models

PARAMETERS = 4074  # of the model with width 4
# Rank 0 prints how many bytes of parameters, gradients and optimizer state each rank holds after a
# step, and the collectives that the step called. In the second step DDP rearranges its buckets, so
# it is the third that is shown.
HELD = (
    BATCH,
    f"""            if (self.epochs_run, step) != (0, 2):
    {BATCH}            else:
                with torch.profiler.profile() as profiler:
        {BATCH}                for event in profiler.key_averages():
                    if event.key.startswith("c10d::"):
                        log(f"called {{event.count}} {{event.key}}")
                held = [*self.model.parameters()]
                held += [parameter.grad for parameter in held]
                for state in self.optimizer.state.values():
                    held += [tensor for tensor in state.values() if tensor.dim() > 0]
                held = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in held)
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, held)
                log(f"held {{everyone}}")
""",
)
# Rank 0 saves the whole state that was loaded.
LOADED = (
    TRAIN,
    """    from torch.distributed.checkpoint import state_dict as states
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    loaded = states.get_state_dict(trainer.model, optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save(loaded, "loaded.pt")
"""
    + TRAIN,
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
CHANNELS_LAST = ("(device)\n    for", "(device, memory_format=torch.channels_last)\n    for")


def resumed_by_four(folder, recipe, *changes):
    """Resume a recipe on four ranks; return the state that it has loaded."""
    job = started_again(folder, recipe, *changes, LOADED, SAMPLES, nprocs=4)
    assert printed(r"(\d+) samples", job) == ["9364"]  # 12942 - 3580, and two of padding
    assert accuracy(job)[2] == 359
    return torch.load(folder / "loaded.pt", weights_only=True)


@SLOW
def test_fsdp2(trained_with, tmp_path):
    """The same weights as DDP, half on each rank; saved, and resumed by two ranks and by four."""
    ddp = trained_with("05", (*DOUBLE, HELD), UNEVEN)
    job = finished(forked(patched(tmp_path, "recipes/fsdp2", *DOUBLE, HELD), *UNEVEN), tmp_path)
    assert difference(job, ddp) < 1e-9
    assert accuracy(job) == accuracy(ddp)
    held = 8 * 4 * PARAMETERS  # float64 parameters, gradients, and two optimizer states
    assert printed("held (.*)", ddp) == [str([held, held])]
    assert printed("held (.*)", job) == [str([held // 2, held // 2])]
    assert printed("called (.*)", ddp) == ["1 c10d::allreduce_"]
    calls = ["4 c10d::_reduce_scatter_base_", "8 c10d::_allgather_base_"]
    assert sorted(printed("called (.*)", job)) == calls

    told_to_stop(tmp_path / "two", "recipes/fsdp2", *DOUBLE)
    shutil.copytree(tmp_path / "two", tmp_path / "four")
    again = started_again(tmp_path / "two", "recipes/fsdp2", *DOUBLE)
    assert same_bits(again, job)
    saved = torch.load(tmp_path / "four" / "checkpoint.pt", weights_only=True)
    loaded = resumed_by_four(tmp_path / "four", "recipes/fsdp2", *DOUBLE, *META)
    assert same(loaded[0], saved["MODEL_STATE"])
    assert same(loaded[1], saved["OPTIMIZER_STATE"])


@SLOW
def test_fsdp2_wants_contiguous_parameters(tmp_path):
    job = run(forked(patched(tmp_path, "recipes/fsdp2", CHANNELS_LAST), *ONE), tmp_path)
    [symptom] = on_screen("recipes/fsdp2")
    assert symptom in "".join(error_lines(job)), job


def sharding():
    """Yield the changes of the recipe fsdp2, except those about checkpoints."""
    _, _, diff = page("recipes/fsdp2").partition("\n@@")
    hunks = diff.partition("\n```")[0].split("\n@@")
    ddp = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    yield ddp, "from torch.distributed.fsdp import fully_shard\n"
    for hunk in hunks:
        if "import" not in hunk and "MODEL_STATE" not in hunk:
            lines = hunk.splitlines()[1:]
            sides = [[line[1:] for line in lines if line[:1] != sign] for sign in "+-"]
            yield tuple("\n".join([*side, ""]) for side in sides)


def converted(folder):
    """Return the whole state in a sharded checkpoint."""
    name = torch.load(folder / "checkpoint.pt", weights_only=True)["FOLDER"]
    dcp_to_torch_save(folder / name, folder / "converted.pt")
    return torch.load(folder / "converted.pt", weights_only=True)


@SLOW
def test_sharded_checkpoint(trained_with, tmp_path):
    """Each rank writes a part; a crash during the save leaves the last checkpoint intact."""
    recipe = "recipes/sharded_checkpoint"
    killed = """            if (self.epochs_run, dist.get_rank()) == (2, 1):
                dcp.FileSystemWriter.write_data = lambda *_: signal.raise_signal(signal.SIGKILL)
"""
    kill = ("            dcp.save(", f"{killed}            dcp.save(")
    run(forked(patched(tmp_path, recipe, *DOUBLE, kill), *UNEVEN), tmp_path)
    broken = tmp_path / "checkpoint.pt.2-0"
    assert broken.exists()
    assert not (broken / ".metadata").exists()
    writes_nothing_again(patched(tmp_path, recipe, *DOUBLE, AT_ONCE), *UNEVEN)
    started_again(tmp_path, recipe, *DOUBLE)
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in broken.iterdir()}
    ddp = trained_with("05", (*DOUBLE, HELD), UNEVEN)
    assert same(converted(tmp_path)["model_state_dict"], weights(ddp))


@SLOW
def test_sharded_checkpoint_with_fsdp2(tmp_path):
    """The same code saves the shards of two ranks, and four ranks load what they need."""
    changes = [*sharding(), *DOUBLE]
    told_to_stop(tmp_path / "told", "recipes/sharded_checkpoint", *changes)
    saved = converted(tmp_path / "told")
    loaded = resumed_by_four(tmp_path / "told", "recipes/sharded_checkpoint", *changes)
    assert same(loaded[0], saved["model_state_dict"])
    assert same(loaded[1], saved["optim_state_dict"])


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


@SLOW
def test_contrastive(tmp_path):
    """Two ranks take the same steps as one with the whole batch, but not without the gradients."""
    jobs = {}
    for name, batch, nprocs, *changes in (
        ("one", 128, 1),
        ("two", 64, 2),
        ("plain", 64, 2, PLAIN),
    ):
        folder = tmp_path / name
        folder.mkdir()
        script = patched(folder, "recipes/contrastive", *DOUBLE, *changes)
        args = ("1", f"--batch-size={batch}", "--width=2")
        jobs[name] = finished(forked(script, *args, nprocs=nprocs), folder)
    assert difference(jobs["one"], jobs["two"]) < 1e-9
    assert difference(jobs["one"], jobs["plain"]) > 1e-3
    assert losses(jobs["one"]) == losses(jobs["two"])


@SLOW
def test_gan(tmp_path):
    """Both models are the same on all ranks; a mid-epoch resume is bit-for-bit identical."""
    compared = (COMPARED[0], COMPARED[1].replace("trainer.model", "trainer.generator"))
    script = patched(tmp_path, "recipes/gan", COMPARED, compared)
    job = finished(forked(script, *UNEVEN), tmp_path)
    assert printed(r"kinds of weights: (\d+)", job) == ["1", "1"]
    told_to_stop(tmp_path / "told", "recipes/gan")
    again = started_again(tmp_path / "told", "recipes/gan")
    saved = [torch.load(j.cwd / "checkpoint.pt", weights_only=True) for j in (job, again)]
    assert same(*saved)
    assert "GENERATOR_STATE" in saved[0]


# ---------------------------------------------------------------- what is trained, and sent

FREEZE = "    model[:5].requires_grad_(False)"


@SLOW
@pytest.mark.parametrize("when", ["before DDP", "after DDP"])
def test_frozen_layers(trained, tmp_path, when):
    """Layers frozen before DDP do not change and are not reduced; frozen later, DDP waits."""
    hook = """    reduced = set()
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def counted(_, bucket):
        reduced.add(bucket.buffer().numel())
        return default_hooks.allreduce_hook(None, bucket)

    trainer.model.register_comm_hook(None, counted)
"""
    pretrained = trained("05", *ONE)
    shutil.copy(pretrained.cwd / "checkpoint.pt", tmp_path / "pretrained.pt")
    if when == "after DDP":
        changes = [(FREEZE, "    #"), (TRAIN, f"    trainer.model.module{FREEZE[9:]}\n{TRAIN}")]
        job = run(forked(patched(tmp_path, "recipes/frozen_layers", *changes), *ONE), tmp_path)
        [symptom] = on_screen("recipes/frozen_layers")
        assert symptom in "".join(error_lines(job)), job
        return
    changes = [(TRAIN, hook + TRAIN), (BARRIER, '    log(f"reduced {reduced}")\n' + BARRIER)]
    job = finished(forked(patched(tmp_path, "recipes/frozen_layers", *changes), *ONE), tmp_path)
    before, after = weights(pretrained), weights(job)
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"0.weight", "0.bias", "2.weight", "2.bias"}
    trainable = sum(tensor.numel() for name, tensor in after.items() if name not in kept)
    assert printed("reduced (.*)", job) == [str({trainable})]
    optimizer = torch.load(job.cwd / "checkpoint.pt", weights_only=True)["OPTIMIZER_STATE"]
    assert len(optimizer["state"]) == 4


@SLOW
def test_compressed_gradients(trained, tmp_path):
    """All gradients are sent with two bytes each; the ranks still have the same weights."""
    spy = """SENT = set()
all_reduce = dist.all_reduce


def spied(tensor, *args, **options):
    SENT.add((str(tensor.dtype), tensor.numel()))
    return all_reduce(tensor, *args, **options)


dist.all_reduce = spied
told_to_stop = """
    changes = [
        ("told_to_stop = ", spy),
        COMPARED,
        ("    dist.destroy", '    log(f"sent {sorted(SENT)}")\n    dist.destroy'),
    ]
    script = patched(tmp_path, "recipes/compressed_gradients", *changes)
    job = finished(forked(script, *ONE), tmp_path)
    [sent] = printed("sent (.*)", job)
    assert str(("torch.float16", PARAMETERS)) in sent
    assert str(("torch.float32", PARAMETERS)) not in sent
    assert printed(r"kinds of weights: (\d+)", job) == ["1"]
    step_5 = trained("05", *ONE)
    assert not same_bits(job, step_5)
    bfloat16 = ("import fp16_", "import bf16_compress_hook as fp16_")
    script = patched(tmp_path, "recipes/compressed_gradients", bfloat16)
    refused = run(forked(script, *ONE), tmp_path)
    [symptom] = on_screen("recipes/compressed_gradients")
    assert symptom in "".join(error_lines(refused)), refused
    assert float(losses(job)[0]) == pytest.approx(float(losses(step_5)[0]), abs=0.02)


# ---------------------------------------------------------------- the weights for others


@SLOW
def test_export(tmp_path):
    """The page's code reads the file without a process group, and gets the same accuracy."""
    job = finished(forked(patched(tmp_path, "recipes/export"), *ONE), tmp_path)
    shutil.move(tmp_path / "05_gather_eval.py", tmp_path / "export.py")
    pattern = "^```python\n(.*?)^```$"
    [code] = re.findall(pattern, page("recipes/export"), re.MULTILINE | re.DOTALL)
    (tmp_path / "read.py").write_text(code, encoding="utf-8")
    reader = finished(server.command(tmp_path / "read.py"), tmp_path)
    _, correct, total = accuracy(job)
    assert reader.stdout == f"{correct} of {total}\n"
