"""The answers in lookup/questions.md, and in two other pages there, work as they are printed."""

import json
import os
import re
import socket
import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from support.jobs import finished, run
from support.once import once
from support.positions import KILLED, ON_RANK_1, at
from support.results import said, same_bits
from support.scripts import LONG, ON_PATH, ROOT, SMALL, edited, forked, load
from torch import nn

SLOW = pytest.mark.slow
INSTALL = "pip install -r lookup/requirements.txt"
ANSWERS = Path(__file__).with_name("answers.py")
PAGES = "".join(
    (ROOT / "lookup" / f"{name}.md").read_text("utf-8")
    for name in ("questions", "data_and_models", "hanging")
)
TRAIN = """\
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(loss)
print(f"rank {dist.get_rank()}: {loss.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
START, END = 'dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"
RANKS = ["rank 0: 3.0", "rank 1: 3.0"]


def blocks(question, language="python"):
    """Return the blocks of code in the answer to a question, which may be cut short."""
    (answer,) = re.findall(rf"^### {re.escape(question)}.*\n((?:(?!##+ ).*\n)*)", PAGES, re.M)
    return re.findall(rf"^```{language}\n(.*?)^```$", answer, re.M | re.S)


def defined(code, **names):
    """Run printed code here; return what it defines."""
    given = {"torch": torch, "nn": nn, "np": np, "os": os, **vars(torch.utils.data), **names}
    exec(compile(code, "printed", "exec"), given)
    return given


def typed(command, cwd, env=None):
    """Run a command as a reader would type it; return the lines that it prints, sorted."""
    job = finished(["bash", "-c", command], cwd, {**ON_PATH, **(env or {})})
    return sorted(filter(None, job.stdout.splitlines()))


def on_two_ranks(program, folder, env=None):
    """Run a program on two forked ranks; return the Result."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    return finished(forked(folder / "program.py"), folder, env)


# ---------------------------------------------------------------- on two ranks, in one run

QUICK = {  # function of answers.py: question
    "accumulation": "How do I accumulate gradients",
    "skip": "How do I skip a bad batch",
    "tokens": "Are gradients, and the loss, summed",
    "evaluation": "How do I evaluate: validation loss",
    "steps": "How many steps has an epoch",
    "longest": "Validation hangs with FSDP",
    "resume": "How do I save and resume",
    "export": "How do I export to ONNX",
    "stop": "How do I save before the Slurm time limit",
}
LLAMA = {  # of Hugging Face
    "adapters": "How do I train LoRA adapters",
    "sharded": "How do I shard a Hugging Face model",
    "generated": "How do I compute BLEU",
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=SLOW) for name in LLAMA)])
def test_on_two_ranks(name):
    for package in ("peft", "transformers") if name in LLAMA else ():
        pytest.importorskip(package, reason=INSTALL)
    questions = LLAMA if name in LLAMA else QUICK
    code = {each: blocks(question) for each, question in questions.items()}
    job = once(code, lambda cwd: finished(forked(ANSWERS, json.dumps(code)), cwd))
    for rank in (0, 1):
        assert f"{name}: works" in said(job, rank), job


def test_which_gpu_is_slow_and_where_the_ranks_are(tmp_path):
    (program,), (where,) = blocks("Which GPU or node is slow"), blocks("Are all GPUs used by")
    where = where.replace("torch.cuda.current_device()", "0")
    printed = on_two_ranks(program.replace(END, where + END), tmp_path).stdout
    shown = re.sub(r"\d+\.\d{3} s", "SECONDS", printed.replace(socket.gethostname(), "HOST"))
    ranks = [f"rank {rank} of 2: HOST, GPU 0" for rank in (0, 1)]
    assert sorted(shown.split("\n")[:-1]) == ["SECONDS  HOST GPU 0", "SECONDS  HOST GPU 1", *ranks]


# ---------------------------------------------------------------- data, inference, checkpoints


def test_batches_of_similar_length():
    batches = defined(blocks("How do I batch samples of similar length")[0])["SimilarLengths"]
    lengths = [(7 * number) % 103 for number in range(103)]  # each once, so they name the samples
    left_out = set()
    for epoch in range(20):
        ranks = [batches(lengths, 4, rank, 3) for rank in range(3)]
        for rank in ranks:
            rank.epoch = epoch
        steps = [[lengths[n] for n in chain(*step)] for step in zip(*ranks, strict=True)]
        assert [max(step) - min(step) for step in steps] == [11] * len(ranks[0])
        assert len({*chain(*steps)}) == 12 * len(steps) == 96
        left_out |= {*lengths} - {*chain(*steps)}
    assert {0, 102} < left_out  # not always the longest


def test_one_copy_of_the_data_set(tmp_path):
    mapped = defined(blocks("How do the processes share one copy")[0])["Mapped"]
    rows = torch.rand(5, 3)
    np.save(tmp_path / "rows.npy", rows.numpy())
    data = mapped(tmp_path / "rows.npy")
    assert isinstance(data.rows, np.memmap)
    assert torch.equal(torch.stack([data[index] for index in range(len(data))]), rows)


def test_inference_in_the_order_of_the_data_set(tmp_path, monkeypatch):
    predict, put_together, _ = blocks("How do I run inference on several GPUs")
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
    question = "How do I load a checkpoint from several GPUs"
    (code,), (convert,) = blocks(question), blocks(question, "bash")
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    monkeypatch.chdir(tmp_path)
    for wrapped in saved, nn.DataParallel(saved):  # whose keys have the prefix of DDP's
        torch.save({"MODEL_STATE": wrapped.state_dict()}, "checkpoint.pt")
        nn.init.zeros_(model.weight)
        defined(code, model=model)
        assert torch.equal(model.weight, saved.weight)
    dcp.save({"model_state_dict": model.state_dict()}, checkpoint_id="FOLDER", no_dist=True)
    nn.init.zeros_(saved.weight)
    typed(convert, tmp_path)
    defined(code, model=saved)
    assert torch.equal(model.weight, saved.weight)


@SLOW
def test_save_every_n_steps(tmp_path, trained):
    """A rank is killed after ten steps of an epoch; the resumed run ends with the same bits."""
    save = blocks("How do I save every N steps")[1].replace("500 == 499", "5 == 4")
    counted = "dist.get_world_size()  # equal batches on all ranks\n"
    changes = [at(1, 12, KILLED, ON_RANK_1), (counted, f"{counted}{save}")]
    path = edited(tmp_path, "05", *changes)
    assert run(forked(path, *LONG), tmp_path).returncode != 0
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (1, 10 * 128)
    assert same_bits(finished(forked(path, *LONG), tmp_path), trained("05", *LONG))


# ---------------------------------------------------------------- large data


@SLOW
def test_data_formats(trained, tmp_path):
    """Step 5 ends with the same weights if a third of its samples is in each of three formats.

    The data set is read, then sent to a loader worker: rank 0 forks it, and rank 1 spawns it.
    """
    h5py, _ = (pytest.importorskip(name, reason=INSTALL) for name in ("h5py", "datasets"))
    from pyarrow import parquet, table

    images, labels = load("05").load_datasets()[0].tensors
    third = len(labels) // 3
    for number, part in enumerate(torch.arange(third).chunk(2)):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for index in part.tolist():
                torch.save((images[index].clone(), labels[index].item()), tmp_path / "sample.pt")
                tar.add(tmp_path / "sample.pt", f"{index}.pt")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("images", data=images[third : 2 * third], chunks=(1, 1, 8, 8))
        file["labels"] = labels[third : 2 * third]
    rows = [images[2 * third :].flatten(1).tolist(), labels[2 * third :].tolist()]
    parquet.write_table(table(rows, ["image", "label"]), tmp_path / "data.parquet")
    code = blocks("My data does not fit")
    (tmp_path / "formats.py").write_text("\n\n".join(code), encoding="utf-8")
    head = "    return TensorDataset(shifted, labels[train].repeat(9)), "
    imports = "from torch.utils.data import ConcatDataset\nfrom formats import *\n"
    files = 'TarShards(["0.tar", "1.tar"]), HDF5("data.h5"), Parquet("data.parquet")'
    opened = f"    shifted = ConcatDataset([{files}])\n"
    opened += "    print([shifted[n] for n in (0, 6000, -1)])\n"
    workers = 'num_workers=1, multiprocessing_context=["fork", "spawn"][dist.get_rank()]'
    changes = [
        (head, f"{opened}    return shifted, "),
        ("\nstop_signals =", f"\n{imports}\nstop_signals ="),
        ("worker_init_fn=outlive", f"{workers}, worker_init_fn=outlive"),
    ]
    env = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    job = finished(forked(edited(tmp_path, "05", *changes), "1", *SMALL), tmp_path, env)
    assert same_bits(job, trained("05", "1", *SMALL))


@SLOW
def test_webdataset(tmp_path, monkeypatch):
    """Each rank gets as many batches as it asks for, and its own samples."""
    wds = pytest.importorskip("webdataset", reason=INSTALL)
    for number in range(4):
        with wds.TarWriter(str(tmp_path / f"{number:04}.tar")) as shard:
            for index in range(50):
                image = torch.full((1, 8, 8), 50.0 * number + index)
                shard.write({"__key__": f"{index:04}", "image.pth": image, "label.cls": index})
    web_loader = defined(blocks("How do I stream the data")[0], wds=wds)["web_loader"]
    drawn = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        batches = list(web_loader(f"pipe:cat {tmp_path}/{{0000..0003}}.tar", 8, 5))
        assert [len(images) for images, _ in batches] == [8] * 5
        drawn.append(torch.cat([images[:, 0, 0, 0] for images, _ in batches]).tolist())
    assert drawn[0] != drawn[1]


@SLOW
@pytest.mark.parametrize("files", [4, 3])  # a multiple of the ranks, and none
def test_hugging_face_datasets(tmp_path, files):
    """Each sample goes to one rank, and is read by one of its loader workers."""
    datasets = pytest.importorskip("datasets", reason=INSTALL)
    from datasets.distributed import split_dataset_by_node as by_node

    names = {"load_dataset": datasets.load_dataset, "split_dataset_by_node": by_node}
    streamed = defined(blocks("How do I stream the data")[1], **names)["streamed"]
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(files)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"sample": 5 * number + index}) for index in range(5)]
        Path(path).write_text("\n".join(lines), encoding="utf-8")
    orders = []
    for epoch in (0, 1):
        shares = [streamed(paths, rank, 2, epoch) for rank in (0, 1)]
        loaders = [torch.utils.data.DataLoader(share, 2, num_workers=2) for share in shares]
        drawn = [batch["sample"].tolist() for loader in loaders for batch in loader]
        orders.append([*chain(*drawn)])
        assert sorted(orders[-1]) == list(range(5 * files))
    assert orders[0] != orders[1]


# ---------------------------------------------------------------- debuggers, logs, commands


@SLOW
def test_breakpoint(tmp_path):
    text = TRAIN.replace("dist.all_reduce", f"{blocks('How do I use pdb')[0]}dist.all_reduce")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    command = blocks("How do I use pdb", "bash")[0].rstrip()
    printed = "\n".join(typed(f"{command} <<< $'up\\np loss * 100\\nc'", tmp_path))
    assert "tensor(100.)" in printed
    assert "tensor(200.)" not in printed
    for line in RANKS:
        assert line in printed


@SLOW
def test_wandb(tmp_path):
    """A run per rank, a step's seconds of each, and what a sweep's agent has drawn, in a file."""
    seconds, each = blocks("How do I log metrics of each rank")
    (sweep,) = blocks("How do I run a W&B sweep with torchrun")
    (tmp_path / "drawn.yaml").write_text("wandb_version: 1\nlr: {value: 0.005}\n", "utf-8")
    env = {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "s"}
    env |= {"WANDB_SWEEP_PARAM_PATH": str(tmp_path / "drawn.yaml")}
    env |= {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    head = "import os, socket, torch, wandb\nimport torch.distributed as dist\n" + START
    shown = 'print(f"rank {dist.get_rank()}: {lr}\\n", end="")\nrun and run.finish()\n'
    took = "step_seconds = 1.5 + dist.get_rank()\n"
    each = each.replace('time.strftime("%Y%m%d-%H%M%S")', '"the group" if run else None')
    parts = [head, sweep, shown, each, took, seconds, "run.finish()\n", END]
    job = on_two_ranks("".join(parts), tmp_path, env)
    assert said(job, 0) == said(job, 1) == ["0.005"]
    files = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    host = socket.gethostname().encode()
    assert sorted(b"the group" in data and host in data for data in files) == [False, True, True]
    (logged,) = [data for data in files if b"step seconds" in data]
    pairs = {*re.findall(rb"step seconds/rank (\d)\D*(\d\.\d)", logged)}
    assert pairs == {(b"0", b"1.5"), (b"1", b"2.5")}


@SLOW
def test_a_package_with_and_without_torchrun(tmp_path):
    """The one process without torchrun is a group, too."""
    torchrun, alone = blocks("How do I start a package", "bash")[0].splitlines()
    (setup,) = blocks("How do I start a package")
    (tmp_path / "package").mkdir()
    program = TRAIN.replace(START, f"{setup}\n\nddp_setup()\n")
    (tmp_path / "package" / "train.py").write_text(program, encoding="utf-8")
    assert typed(torchrun.replace("=4", "=2"), tmp_path) == RANKS
    assert typed(alone, tmp_path) == ["rank 0: 1.0"]


@SLOW
def test_logs_and_the_workflow(tmp_path):
    """What installs packages, and the actions of others, are left out."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    workflow = yaml.safe_load(blocks("How do I test DDP code in CI", "yaml")[0])
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands.pop(0).startswith("pip install -r requirements.txt ")
    for command in [*commands, *blocks("How do I get one log per rank", "bash")]:
        printed = typed(command, tmp_path, job["env"])
        assert [line for line in printed if "==>" not in line] == RANKS


@SLOW
def test_from_launch_to_torchrun(tmp_path):
    old, new = blocks("How do I move from torch.distributed.launch", "diff")[0].splitlines()
    (both,) = blocks("How do I move from torch.distributed.launch")
    appended = blocks("How do I move from torch.distributed.launch", "bash")[0]
    head = f"import argparse, os\nparser = argparse.ArgumentParser()\n{both}"
    shown = "print(f\"{os.environ['LOCAL_RANK']} {parser.parse_args().local_rank}\\n\", end='')\n"
    (tmp_path / "train.py").write_text(head + shown, encoding="utf-8")
    assert typed(old[1:], tmp_path) == ["0 0", "1 1"]
    assert typed(new[1:], tmp_path) == ["0 None", "1 None"]
    assert typed(appended, tmp_path) == ["0 0", "1 1"]
