"""The code that lookup/ prints works: each command, and each block of Python, without a †."""

import argparse
import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from clusters import ON_A_CLUSTER
from pages import blocks, tried
from support.jobs import finished, free_port, run
from support.once import once
from support.results import said
from support.scripts import ON_PATH, ROOT, forked
from torch import nn

SLOW = pytest.mark.slow
INSTALL = "pip install -r lookup/requirements.txt"
ANSWERS = Path(__file__).with_name("answers.py")
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
RANKS = ["rank 0: 3.0", "rank 1: 3.0"]


def defined(code, **names):
    """Run printed code here; return what it defines."""
    given = {"torch": torch, "nn": nn, "np": np, **names}
    exec(compile(code, "printed", "exec"), given)
    return given


def typed(command, cwd, code=0):
    """Run a command as a reader would type it; return the lines that it prints, sorted."""
    job = run(["bash", "-c", command], cwd, {**ON_PATH, "HOME": str(cwd)})
    assert job.returncode <= code, job
    return sorted(filter(None, job.stdout.splitlines()))


# ---------------------------------------------------------------- Python

QUICK = {  # function of answers.py: entry
    "accumulation": "How do I accumulate gradients",
    "skip": "How do I skip a bad batch",
    "tokens": "Are gradients, and the loss, summed",
    "clipped": "Where do I clip gradients",
    "evaluation": "How do I evaluate: validation loss",
    "steps": "How many steps has an epoch",
    "shortest": "It hangs at the end of an epoch",
    "resume": "How do I save and resume",
    "jump": "After a resume the loss jumps up",
    "stream": "Every GPU gets the same data from",
    "inference": "How do I run inference",
    "one_copy": "The machine's memory (RAM)",
    "stop": "My job was stopped at its time limit",
}
WITH = {  # the same, with the package that it needs
    "adapters": ("How do I train LoRA", "peft"),
    "on_rank_0": ("Everything is printed once", "tqdm"),
    "one_run": ("Each rank opens its own W&B run", "wandb"),
}
ALONE = (  # each has a test of its own
    "`mp.spawn`:",
    "How do I load a checkpoint from several",
    "`_pickle.UnpicklingError",
    "How do I make a script for one GPU train",
    "Is it my script, or the machine?",
    "How do I debug one rank",
)
LIBRARY = re.compile(  # blocks with these names are run by test_frameworks.py, or by no test
    r"\b(Accelerator|accelerator|[Tt]rainer|training_args|deepspeed)\b"
)


def rest():
    """Return (title, code) of each block of Python that no other test tries."""
    starts = (*QUICK.values(), *(start for start, _ in WITH.values()), *ALONE)
    found = [block for block in tried() if block.language == "python"]
    found = [block for block in found if not block.title.startswith(starts)]
    return [block[1::2] for block in found if not LIBRARY.search(block.code)]


@pytest.mark.parametrize("name", [*QUICK, "others", *(pytest.param(n, marks=SLOW) for n in WITH)])
def test_on_two_ranks(name):
    if name in WITH:
        start, package = WITH[name]
        pytest.importorskip(package, reason=INSTALL)
        code = {name: blocks(start)}
    elif name == "others":
        code = {name: rest()}
    else:
        code = {each: blocks(start) for each, start in QUICK.items()}
    job = once(code, lambda cwd: finished(forked(ANSWERS, json.dumps(code)), cwd))
    for rank in (0, 1):
        assert f"{name}: works" in said(job, rank), job


def test_the_lines_of_ddp(tmp_path):
    (code,) = blocks("How do I make a script for one GPU train")
    lines = ["import os", "import torch", "from torch import nn"]
    lines += ["from torch.utils.data import DataLoader, TensorDataset"]
    lines += ["data, epochs = TensorDataset(torch.rand(128, 4)), 2"]
    lines += ["build_model = lambda: nn.Linear(4, 1)"]
    lines += ["def train_one_epoch(model, loader):", "    for (x,) in loader:"]
    lines += [
        "        model(x).sum().backward()",
        "        print(f'rank {dist.get_rank()}: {len(x)}')",
    ]
    (tmp_path / "program.py").write_text("\n".join([*lines, code]), encoding="utf-8")
    job = finished(forked(tmp_path / "program.py"), tmp_path)
    assert said(job, 0) == said(job, 1) == ["32"] * 4
    assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}


@SLOW
def test_breakpoint(tmp_path):
    """The other rank waits, and both go on."""
    (line,) = blocks("How do I debug one rank")
    text = TRAIN.replace("dist.all_reduce", f"{line}dist.all_reduce")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    start = "torchrun --standalone --nproc-per-node=2 train.py"
    printed = "\n".join(typed(f"{start} <<< $'up\\np loss * 100\\nc'", tmp_path))
    for part in ("tensor(100.)", *RANKS):
        assert part in printed
    assert "tensor(200.)" not in printed


def test_processes_that_are_spawned(tmp_path):
    (code,) = blocks("`mp.spawn`:")
    (tmp_path / "spawned.py").write_text(f"from torch import multiprocessing as mp\n\n\n{code}")
    assert typed("python spawned.py", tmp_path) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_checkpoint_of_several_gpus_on_one(tmp_path, monkeypatch):
    title = "How do I load a checkpoint from several GPUs"
    (code,), (convert,) = blocks(title), blocks(title, "bash")
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    monkeypatch.chdir(tmp_path)
    for wrapped in saved, nn.DataParallel(saved):  # whose keys have the prefix of DDP's
        for state in {"model": wrapped.state_dict()}, wrapped.state_dict():
            torch.save(state, "checkpoint.pt")
            nn.init.zeros_(model.weight)
            defined(code, model=model)
            assert torch.equal(model.weight, saved.weight)
    dcp.save({"model": model.state_dict()}, checkpoint_id="FOLDER", no_dist=True)
    nn.init.zeros_(saved.weight)
    typed(convert, tmp_path)
    defined(code, model=saved)
    assert torch.equal(model.weight, saved.weight)


def test_types_that_are_allowed_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, numpy = blocks("`_pickle.UnpicklingError: Weights only")
    for code, saved in (own, argparse.Namespace(lr=0.1)), (numpy, np.random.get_state()):
        torch.save({"saved": saved}, "checkpoint.pt")
        with pytest.raises(Exception, match="Unsupported global"):
            torch.load("checkpoint.pt", weights_only=True)
        try:
            defined(code, argparse=argparse)
            assert torch.load("checkpoint.pt", weights_only=True)
        finally:
            torch.serialization.clear_safe_globals()


@SLOW
def test_timeouts_of_libraries(tmp_path, monkeypatch):
    accelerate, transformers = map(pytest.importorskip, ("accelerate", "transformers"))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("How do I change the timeout")
    _, *lines = code.splitlines()  # PyTorch's own
    names = {"Accelerator": accelerate.Accelerator, "timedelta": timedelta}
    names |= {"TrainingArguments": transformers.TrainingArguments}
    for line in lines:
        defined(line, InitProcessGroupKwargs=accelerate.InitProcessGroupKwargs, **names)


# ---------------------------------------------------------------- commands

MAY_FIND_NOTHING = re.compile(r"\b(grep|pgrep|getent|find|timeout)\b")
TWO_MACHINES = re.compile(r"torchrun --nnodes=2 .*--rdzv-endpoint=HOST:\d+.*")


def commands():
    """Return the commands of all pages but Slurm's, each once, without their comments."""
    found = {}
    for block in tried():
        if block.language == "bash" and block.page not in ("slurm", "frameworks"):
            code = re.sub(r"\\\n *", "", block.code)
            code = re.sub("--nproc-per-node=(gpu|4)", "--nproc-per-node=2", code)
            code = re.sub("--rdzv-endpoint=HOST:[0-9]+", "--rdzv-endpoint=HOST:29400", code)
            for line in re.sub(r"(^|\s+)#.*", "", code, flags=re.MULTILINE).splitlines():
                found[re.sub(r"^(CUDA_VISIBLE_DEVICES=\S* )?!?", "", line.strip())] = block.title
    return {line: title for line, title in found.items() if line}


@pytest.fixture
def folder(tmp_path):
    """A reader's folder: a script, also as a package, a virtual environment, checkpoints."""
    dcp.save({"weight": torch.zeros(1)}, checkpoint_id=tmp_path / "FOLDER", no_dist=True)
    (tmp_path / "lookup").symlink_to(ROOT / "lookup")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (test,) = blocks("Is it my script, or the machine?")
    (tmp_path / "test.py").write_text(test.replace("2**24", "2"), encoding="utf-8")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"export PATH={ON_PATH['PATH']}\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


@SLOW
def test_each_command(folder):
    for line, title in commands().items():
        assert not re.search("[…]|[.]{3}", line), (title, line)
        shown = line.replace("HOST", "127.0.0.1").replace("PID", str(os.getpid()))
        if TWO_MACHINES.fullmatch(line):
            shown = re.sub(r":\d+", f":{free_port()}", shown)
            shown = shown.replace("--nproc-per-node=2", "--nproc-per-node=1")
            shown = f"{shown} & {shown} & wait"
        printed = typed(shown, folder, code=bool(MAY_FIND_NOTHING.search(line)))
        if line.startswith("torchrun ") and "--redirects" not in line:
            assert any("rank 0: " in each for each in printed), (title, printed)


# ---------------------------------------------------------------- Slurm


@SLOW
@ON_A_CLUSTER
def test_slurm(cluster, folder):
    """The batch files run, and what a reader types about a job finds it."""
    first, about = blocks("How do I submit my script as a job?", "bash")
    (four,) = blocks("How do I ask for one machine with four GPUs?", "bash")

    def typed_there(line):
        return cluster.run("bash", "-c", line, cwd=folder)

    def prints(text, program, pattern, wanted, sbatch="sbatch train.sbatch"):
        """Submit a batch file; return the job's number once the output has these lines."""
        text = re.sub("--cpus-per-task=[0-9]+", "--cpus-per-task=2", text)
        text = re.sub(" --mem=[0-9]+G", "", text)  # nodes of the practice cluster are smaller
        (folder / "train.sbatch").write_text(text, encoding="utf-8")
        (folder / "train.py").write_text(program, encoding="utf-8")
        job, end = typed_there(sbatch).split()[-1], time.monotonic() + 120
        while time.monotonic() < end:
            files = folder.glob(pattern.replace("JOB", job))
            found = {line for path in files for line in path.read_text().splitlines()}
            if found >= wanted:
                return job
            time.sleep(0.2)
        raise AssertionError((pattern, found))

    submit, listed, shell, cancelled = about.splitlines()
    hello = "print('hello', flush=True)\nimport time\ntime.sleep(600)\n"
    job = prints(first, hello, "train_JOB.out", {"hello"}, submit)
    assert job in typed_there(listed)
    lines = [line for each in tried() if each.page == "slurm" for line in each.code.splitlines()]
    for line in lines:
        if line.startswith(("squeue", "scontrol show", "sinfo", "grep", "sed", "head", "mkdir")):
            shown = line.split("  #")[0].replace("JOB", job)
            typed_there(f"{shown}{' || [ $? = 1 ]' * line.startswith('grep')}")  # or it fails
    shell = shell.replace("JOB", job).replace("--pty bash", "hostname")
    assert typed_there(shell).startswith("node")
    typed_there(cancelled.replace("JOB", job))
    prints(four, TRAIN, "train.sbatch_JOB.out", {f"rank {rank}: 10.0" for rank in range(4)})
