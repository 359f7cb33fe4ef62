"""The answers in lookup/questions.md and lookup/data_and_models.md work as they are printed."""

import importlib
import io
import json
import re
import socket
import sys
import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.jobs import finished, run
from support.once import once
from support.positions import KILLED, ON_RANK_1, at
from support.results import said, same_bits
from support.scripts import LONG, ON_PATH, ROOT, SMALL, edited, forked, load
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader

SLOW = pytest.mark.slow
ANSWERS = Path(__file__).with_name("answers.py")
PAGES = "".join(
    (ROOT / "lookup" / name).read_text("utf-8") for name in ("questions.md", "data_and_models.md")
)
TRAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(loss)
print(f"rank {dist.get_rank()}: {loss.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
RANKS = ["rank 0: 3.0", "rank 1: 3.0"]
WITHOUT_TORCH = 'import os\n\nprint("rank " + os.environ["RANK"] + "\\n", end="")\n'


def blocks(question, language="python"):
    """Return the blocks of code in the answer to a question, which may be cut short."""
    (answer,) = re.findall(rf"^### {re.escape(question)}.*\n((?:(?!##+ ).*\n)*)", PAGES, re.M)
    return re.findall(rf"^```{language}\n(.*?)^```$", answer, re.M | re.S)


def typed(command, cwd, env=None):
    """Run a command as a reader would type it; return the Result."""
    return finished(["bash", "-c", command], cwd, {**ON_PATH, **(env or {})})


def printed(job):
    return sorted(filter(None, job.stdout.splitlines()))


def on_two_ranks(program, folder, env=None):
    """Run a program on two forked ranks; return the Result."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    return finished(forked(folder / "program.py"), folder, env)


# ---------------------------------------------------------------- on two ranks, in one run


ANSWERED = {  # question: what both ranks say
    "How do I accumulate gradients": "True",
    "How do I skip a bad batch": "True False",  # and by rank 0's loss alone
    "Are gradients, and the loss, summed": "True True True True",
    "How do I evaluate: validation loss": "0.5556 0.2222 True",
    "How many steps has an epoch": "6 0.01",
    "How do I save and resume": "True",
    "How do I export to ONNX": "True refused refused refused",
    "How do I save before the Slurm time limit": "[(0, 10)]",
}


@pytest.mark.parametrize("question", ANSWERED)
def test_on_two_ranks(question):
    code = {name: blocks(name) for name in ANSWERED}
    job = once(code, lambda cwd: finished(forked(ANSWERS, json.dumps(code)), cwd))
    for rank in (0, 1):
        lines = [line for line in said(job, rank) if line.startswith(question)]
        assert lines == [f"{question}: {ANSWERED[question]}"]


# ---------------------------------------------------------------- GPUs, data, inference


def test_which_gpu_is_slow_and_where_the_ranks_are(tmp_path):
    (program,), (where,) = blocks("Which GPU or node is slow"), blocks("Are all GPUs used by")
    where = where.replace("torch.cuda.current_device()", "0")
    end = "dist.destroy_process_group()"
    lines = printed(on_two_ranks(program.replace(end, where + end), tmp_path))
    host = re.escape(socket.gethostname())
    for rank, line in enumerate(lines[2:]):
        assert re.fullmatch(rf"rank {rank} of 2: {host}, GPU 0", line)
    found = [re.fullmatch(rf"(\d+\.\d{{3}}) s  {host} GPU (\d)", line) for line in lines[:2]]
    assert sorted(match[2] for match in found) == ["0", "1"]


HEAD = """\
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

"""


def defined(code, **names):
    """Run printed code; return what it defines."""
    exec(compile(HEAD + code, "printed", "exec"), names)
    return names


def test_batches_of_similar_length():
    batches = defined(blocks("How do I batch samples of similar length")[0])["SimilarLengths"]
    lengths = [(7 * number) % 103 for number in range(103)]
    left_out = set()
    for epoch in range(20):
        ranks = [batches(lengths, 4, rank, 3) for rank in range(3)]
        for rank in ranks:
            rank.epoch = epoch
        steps = [[*chain(*step)] for step in zip(*ranks, strict=True)]
        assert len(steps) == len(ranks[0]) == 103 // 12
        for step in steps:
            of_all = [lengths[sample] for sample in step]
            assert (len(step), max(of_all) - min(of_all)) == (12, 11)
        seen = {sample for step in steps for sample in step}
        assert len(seen) == 96
        left_out |= {lengths[sample] for sample in range(103) if sample not in seen}
    assert {0, 102} < left_out  # not always the longest


def test_one_copy_of_the_data_set(tmp_path):
    mapped = defined(blocks("How do the processes share one copy")[0])["Mapped"]
    rows = torch.rand(5, 3)
    np.save(tmp_path / "rows.npy", rows.numpy())
    data = mapped(tmp_path / "rows.npy")
    assert isinstance(data.rows, np.memmap)
    assert torch.equal(torch.stack([data[index] for index in range(len(data))]), rows)


def test_inference_in_the_order_of_the_data_set(tmp_path, monkeypatch):
    predict, put_together = blocks("How do I run inference on several GPUs")
    samples, model = torch.rand(11, 3), nn.Linear(3, 2)
    monkeypatch.chdir(tmp_path)
    for rank in range(3):
        for name, value in (("RANK", rank), ("LOCAL_RANK", 0), ("WORLD_SIZE", 3)):
            monkeypatch.setenv(name, str(value))
        defined(predict, dataset=samples, model=model)
    predictions = defined(put_together, ranks=3)["predictions"]
    with torch.inference_mode():
        assert torch.allclose(predictions, model.cpu()(samples))


def test_a_checkpoint_of_several_gpus_on_one(tmp_path, monkeypatch):
    code = blocks("How do I load a checkpoint from several GPUs")[0]
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    monkeypatch.chdir(tmp_path)
    for wrapped in saved, nn.DataParallel(saved):  # whose keys have the prefix of DDP's
        torch.save({"MODEL_STATE": wrapped.state_dict()}, "checkpoint.pt")
        nn.init.zeros_(model.weight)
        defined(code, model=model)
        assert torch.equal(model.weight, saved.weight)


@SLOW
def test_save_every_n_steps(tmp_path, trained):
    """A rank is killed after ten steps of an epoch; the resumed run ends with the same bits."""
    save = blocks("How do I save every N steps")[0].replace("500 == 499", "5 == 4")
    counted = "dist.get_world_size()  # equal batches on all ranks\n"
    changes = [at(1, 12, KILLED, ON_RANK_1), (counted, f"{counted}{save}")]
    path = edited(tmp_path, "05", *changes)
    assert run(forked(path, *LONG), tmp_path).returncode != 0
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (1, 10 * 128)
    assert same_bits(finished(forked(path, *LONG), tmp_path), trained("05", *LONG))


# ---------------------------------------------------------------- debuggers and logs


@SLOW
def test_breakpoint(tmp_path):
    line = blocks("How do I use pdb")[0]
    text = TRAIN.replace("dist.all_reduce", f"{line}dist.all_reduce")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    (tmp_path / "typed").write_text("up\np loss * 100\nc\n", encoding="utf-8")
    command = blocks("How do I use pdb", "bash")[0].rstrip()
    job = typed(f"{command} < typed", tmp_path)
    assert "tensor(100.)" in job.stdout
    assert "tensor(200.)" not in job.stdout
    for line in RANKS:
        assert line in job.stdout


@SLOW
def test_logs(tmp_path):
    (tmp_path / "train.py").write_text(WITHOUT_TORCH, encoding="utf-8")
    job = typed(blocks("How do I get one log per rank", "bash")[0], tmp_path)
    assert [line for line in printed(job) if "==>" not in line] == ["rank 0", "rank 1"]


@SLOW
def test_wandb(tmp_path):
    """A run per rank, a step's seconds of each, and what a sweep's agent has drawn, in a file."""
    seconds, each = blocks("How do I log metrics of each rank")
    question = "How do I run a W&B sweep with torchrun"
    assert yaml.safe_load(blocks(question, "yaml")[0])["command"][0] == "torchrun"
    (sweep,) = blocks(question)
    (tmp_path / "drawn.yaml").write_text("wandb_version: 1\nlr: {value: 0.005}\n", "utf-8")
    head = TRAIN.partition("loss = ")[0].replace(
        "import torch\n", "import os, socket, torch, wandb\n"
    )
    head += "step_seconds = 1.5 + dist.get_rank()\n"
    env = {"WANDB_MODE": "offline", "TORCHELASTIC_RUN_ID": "the group"}
    env |= {"WANDB_SWEEP_ID": "s", "WANDB_SWEEP_PARAM_PATH": str(tmp_path / "drawn.yaml")}
    env |= {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    between = 'print(f"rank {dist.get_rank()}: {lr}\\n", end="")\nrun and run.finish()\n'
    end = "run.finish()\ndist.destroy_process_group()\n"
    job = on_two_ranks(head + sweep + between + each + seconds + end, tmp_path, env)
    assert said(job, 0) == said(job, 1) == ["0.005"]
    files = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    host = socket.gethostname().encode()
    assert sorted(b"the group" in data and host in data for data in files) == [False, True, True]
    (logged,) = [data for data in files if b"step seconds" in data]
    pairs = {*re.findall(rb"step seconds/rank (\d)\D*(\d\.\d)", logged)}
    assert pairs == {(b"0", b"1.5"), (b"1", b"2.5")}


# ---------------------------------------------------------------- large data


@pytest.fixture
def formats(tmp_path, monkeypatch):
    """The module that the answer's blocks make, beside step 5's samples: a third in each format."""
    for name in ("h5py", "datasets"):
        pytest.importorskip(name, reason="pip install -r lookup/requirements.txt")
    h5py, parquet = importlib.import_module("h5py"), importlib.import_module("pyarrow.parquet")
    images, labels = load("05").load_datasets()[0].tensors
    third = len(labels) // 3
    for number, start in enumerate((0, third // 2)):  # the first third, in two tar files
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for index in range(start, start + third // 2):
                data = io.BytesIO()
                torch.save((images[index].clone(), labels[index].item()), data)
                member = tarfile.TarInfo(f"{index}.pt")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("images", data=images[third : 2 * third], chunks=(1, 1, 8, 8))
        file["labels"] = labels[third : 2 * third]
    rows = [images[2 * third :].flatten(1).tolist(), labels[2 * third :].tolist()]
    table = importlib.import_module("pyarrow").table(rows, ["image", "label"])
    parquet.write_table(table, tmp_path / "data.parquet")
    *code, _, _ = blocks("My data does not fit")
    (tmp_path / "formats.py").write_text("\n\n".join(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    yield
    sys.modules.pop("formats", None)


MADE = 'ConcatDataset([TarShards(["0.tar", "1.tar"]), HDF5("data.h5"), Parquet("data.parquet")])'


@SLOW
def test_data_formats(formats, trained, tmp_path):
    """Step 5 ends with the same weights, with its samples in files and with loader workers."""
    head = "    return TensorDataset(shifted, labels[train].repeat(9)), "
    imports = "from torch.utils.data import ConcatDataset\nfrom formats import *\n"
    opened = f"    shifted = {MADE}\n    print([shifted[n] for n in (0, 6000, -1)])\n"
    changes = [
        (head, f"{opened}    return shifted, "),
        ("\nstop_signals =", f"\n{imports}\nstop_signals ="),
        ("worker_init_fn=outlive", "num_workers=2, worker_init_fn=outlive"),
    ]
    job = finished(forked(edited(tmp_path, "05", *changes), "1", *SMALL), tmp_path)
    assert same_bits(job, trained("05", "1", *SMALL))


@SLOW
def test_data_formats_in_spawned_workers(formats, tmp_path, monkeypatch):
    """The data set is read before it is sent to the workers."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("formats")
    data = eval(MADE, {**vars(module), "ConcatDataset": ConcatDataset})
    some = [0, 6000, len(data) - 1]
    read = [data[index] for index in some]
    loader = DataLoader(data, 1, sampler=some, num_workers=1, multiprocessing_context="spawn")
    for (image, label), (images, labels) in zip(read, loader, strict=True):
        assert torch.equal(images[0], image)
        assert labels[0] == label


@SLOW
def test_webdataset(tmp_path, monkeypatch):
    """Each rank gets as many batches as it asks for, and its own samples."""
    wds = pytest.importorskip("webdataset", reason="pip install -r lookup/requirements.txt")
    for number in range(4):
        with wds.TarWriter(str(tmp_path / f"{number:04}.tar")) as shard:
            for index in range(50):
                image = torch.full((1, 8, 8), 50.0 * number + index)
                shard.write({"__key__": f"{index:04}", "image.pth": image, "label.cls": index})
    space = {"wds": wds}
    exec(blocks("My data does not fit")[-2], space)
    drawn = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        loader = space["web_loader"](f"pipe:cat {tmp_path}/{{0000..0003}}.tar", 8, 5)
        batches = list(loader)
        assert [len(images) for images, _ in batches] == [8] * 5
        drawn.append(torch.cat([images[:, 0, 0, 0] for images, _ in batches]).tolist())
    assert drawn[0] != drawn[1]


@SLOW
def test_hugging_face_datasets(tmp_path):
    """Each sample goes to one rank, and is read by one of its loader workers."""
    datasets = pytest.importorskip("datasets", reason="pip install -r lookup/requirements.txt")
    space = {"load_dataset": datasets.load_dataset}
    space["split_dataset_by_node"] = importlib.import_module(
        "datasets.distributed"
    ).split_dataset_by_node
    exec(blocks("My data does not fit")[-1], space)
    for number in range(4):
        lines = [json.dumps({"sample": 5 * number + index}) for index in range(5)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for files in (4, 3):  # a multiple of the ranks, and none
        paths = [str(tmp_path / f"{number}.jsonl") for number in range(files)]
        orders = []
        for epoch in (0, 1):
            shares = [space["streamed"](paths, rank, 2, epoch) for rank in (0, 1)]
            loaders = [DataLoader(share, 2, num_workers=2) for share in shares]
            drawn = [torch.cat([batch["sample"] for batch in loader]) for loader in loaders]
            orders.append(torch.cat(drawn))
            assert sorted(orders[-1].tolist()) == list(range(5 * files))
        assert not torch.equal(*orders)


class Drawn(torch.utils.data.IterableDataset):
    """A data set that draws its epoch, a number that all copies share, or a number of its own."""

    def __init__(self, shared):
        self.epoch = torch.zeros(1, dtype=torch.int64)
        if shared:
            self.epoch.share_memory_()

    def __iter__(self):
        yield self.epoch.item()


@pytest.mark.parametrize(("shared", "epochs"), [(False, {0}), (True, {0, 1, 2})])
def test_a_shared_epoch_reaches_persistent_workers(shared, epochs):
    data, found = Drawn(shared), set()
    options = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(data, 1, num_workers=1, **options)
    for epoch in range(3):
        data.epoch.fill_(epoch)
        found |= {batch.item() for batch in loader}
    assert found == epochs


# ---------------------------------------------------------------- large models

LLAMA = """\
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

dist.init_process_group("gloo")
device = torch.device("cpu")
tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
mine = tokens[dist.get_rank() :][:1]
SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


def say(*what):
    print(f"rank {dist.get_rank()}: {' '.join(map(str, what))}\\n", end="", flush=True)


def build_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, **HEADS))


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


"""
LORA = """
parts = model.module.named_parameters()
assert {name for name, part in parts if part.requires_grad and "lora_" not in name} == set()
before = weights(model)
for _ in range(2):
    model(input_ids=mine, labels=mine).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
say("trained", (weights(model) != before).sum().item() > 0)
both = [torch.empty_like(before) for _ in range(2)]
dist.all_gather(both, weights(model))
say("same", torch.equal(*both))
"""
LOADED = """
again = PeftModel.from_pretrained(build_model(), "adapter")
say("loaded", torch.equal(again(input_ids=mine).logits, model(input_ids=mine).logits))
say("frozen", torch.equal(weights(build_model()), weights(again.unload())))
"""
SHARDED = """
if dist.get_rank() == 0:
    build_model().save_pretrained("start")
dist.barrier()
model, plain = sharded("start"), build_model()
start = weights(plain)
say("half", 2 * sum(part.to_local().numel() for part in model.parameters()) == start.numel())
for each, batch in (model, mine), (plain, tokens):
    optimizer = torch.optim.SGD(each.parameters(), lr=1.0)  # moves by what the gradient is
    each(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
save(model, "trained")
trained = AutoModelForCausalLM.from_pretrained("trained", dtype=torch.float32)
moved, missed = weights(plain) - start, weights(trained) - weights(plain)
say("as one", (missed.norm() < moved.norm() / 50).item())
"""
GENERATED = """
class tokenizer:
    decode = staticmethod(lambda tokens: " ".join(map(str, tokens.tolist())))


prompts = list(torch.randint(64, (5, 1, 3), generator=torch.Generator().manual_seed(1)))
model = DDP(build_model())
{}
if dist.get_rank() == 0:
    options = {{"max_new_tokens": 8, "do_sample": False}}
    alone = [tokenizer.decode(build_model().generate(each, **options)[0]) for each in prompts]
    say("generated", hypotheses == alone)
dist.barrier()
dist.destroy_process_group()
"""


@SLOW
def test_models_of_hugging_face(tmp_path):
    """Adapters, a sharded model (in bfloat16, a step ends near to that in float32), and texts."""
    for name in ("peft", "transformers"):
        pytest.importorskip(name, reason="pip install -r lookup/requirements.txt")
    wrap, save_adapters = blocks("How do I train LoRA adapters")
    shard, save = blocks("How do I shard a Hugging Face model")
    (generate,) = blocks("How do I compute BLEU")
    parts = [LLAMA, wrap, LORA, save_adapters, LOADED, shard, save, SHARDED]
    job = on_two_ranks("\n\n".join([*parts, GENERATED.format(generate)]), tmp_path)
    results = [f"{what} True" for what in ("trained", "same", "loaded", "frozen", "half", "as one")]
    assert said(job, 1) == results
    assert said(job, 0) == [*results, "generated True"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000


# ---------------------------------------------------------------- commands, and older ways


@SLOW
def test_a_package_with_and_without_torchrun(tmp_path):
    """The one process without torchrun is a group, too."""
    torchrun, alone = blocks("How do I start a package", "bash")[0].splitlines()
    (setup,) = blocks("How do I start a package")
    (tmp_path / "package").mkdir()
    program = f"""\
import os
import sys

import torch
import torch.distributed as dist

{setup}
ddp_setup()
dist.barrier()
print(f"{{dist.get_rank()}} of {{dist.get_world_size()}} {{sys.argv[1:]}}\\n", end="")
dist.destroy_process_group()
"""
    (tmp_path / "package" / "train.py").write_text(program, encoding="utf-8")
    two = torchrun.replace("--nproc-per-node=4", "--nproc-per-node=2")
    for command, ranks in (two, 2), (alone, 1):
        lines = [f"{rank} of {ranks} ['--config', 'a.yaml']" for rank in range(ranks)]
        assert printed(typed(command, tmp_path)) == lines


@SLOW
def test_the_workflow(tmp_path):
    """What installs packages, and the actions of others, are left out."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    workflow = yaml.safe_load(blocks("How do I test DDP code in CI", "yaml")[0])
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands.pop(0).startswith("pip install -r requirements.txt ")
    for command in commands:
        assert printed(typed(command, tmp_path, job["env"])) == RANKS


@SLOW
def test_from_launch_to_torchrun(tmp_path):
    old, new = blocks("How do I move from torch.distributed.launch", "diff")[0].splitlines()
    (both,) = blocks("How do I move from torch.distributed.launch")
    appended = blocks("How do I move from torch.distributed.launch", "bash")[0]
    path = tmp_path / "train.py"
    accepts = f"import argparse\n{WITHOUT_TORCH}parser = argparse.ArgumentParser()\n{both}"
    shown = "{os.environ['LOCAL_RANK']} {parser.parse_args().local_rank}\\n"
    shows = f'print(f"{shown}", end="")\n'
    path.write_text(accepts + shows, encoding="utf-8")
    assert {"0 0", "1 1"} <= set(printed(typed(old[1:], tmp_path)))
    assert {"0 None", "1 None"} <= set(printed(typed(new[1:], tmp_path)))
    assert {"0 0", "1 1"} <= set(printed(typed(appended, tmp_path)))
