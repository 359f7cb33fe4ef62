"""The code that more/lookup/ prints works: each command, and each block of Python, without a †."""

import inspect
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from clusters import ON_A_CLUSTER, Submitted
from pages import blocks, tried
from support.jobs import finished, free_port, run
from support.once import once
from support.results import said
from support.scripts import ON_PATH, ROOT, forked
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP

SLOW = pytest.mark.slow
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


def typed(command, cwd, code=0):
    """Run a command as a reader would type it; return the lines that it prints, sorted."""
    job = run(["bash", "-c", command], cwd, {**ON_PATH, "HOME": str(cwd)})
    assert job.returncode <= code, job
    return sorted(filter(None, job.stdout.splitlines()))


# ---------------------------------------------------------------- Python

ENTRIES = {  # function of answers.py: entry
    "accumulation": "How do I accumulate gradients",
    "tokens": "Are gradients, and the loss, summed",
    "clipped": "Where do I clip gradients",
    "evaluation": "How do I evaluate: validation loss",
    "resume": "How do I save and resume",
    "stream": "Every GPU gets the same data from",
    "inference": "How do I run inference",
    "archive": "Loading many small files",
    "adapters": "How do I train LoRA",
}
ELSEWHERE = (  # each has a test of its own, here or in test_frameworks.py
    "`mp.spawn`:",
    "How do I make a script for one GPU train",
    "Is it my script, or the machine?",
    "How do I debug one rank",
    "My job was stopped at its time limit",
    "Every rank tokenizes",
    "The Hugging Face Trainer on several",
)
PACKAGES = {"adapters": "peft", "with_packages": "wandb"}  # what these two need


def rest():
    """Return (title, code) of each block of Python that no other test tries."""
    starts = (*ENTRIES.values(), *ELSEWHERE)
    found = [block for block in tried() if block.language == "python"]
    found = [block[1::2] for block in found if not block.title.startswith(starts)]
    return [(title, code) for title, code in found if "accelerator.pad" not in code]


def codes_beside(name):
    """Return {function of answers.py: blocks} for the run that includes this one."""
    if name == "adapters":
        return {name: blocks(ENTRIES[name])}
    if name in ENTRIES:
        return {each: blocks(start) for each, start in ENTRIES.items() if each != "adapters"}
    needs = [bool(re.search(r"\btqdm|\bwandb|Accelerator\(", code)) for _, code in rest()]
    return {"others": [it for it, need in zip(rest(), needs) if need == (name in PACKAGES)]}


SLOWER = [pytest.param(name, marks=SLOW) for name in PACKAGES]


@pytest.mark.parametrize("name", [*sorted({*ENTRIES, "others"} - {*PACKAGES}), *SLOWER])
def test_on_two_ranks(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="pip install -r more/lookup/requirements.txt")
    codes, env = codes_beside(name), {"WANDB_MODE": "offline", "HOME": os.environ["TMPDIR"]}
    job = once(codes, lambda cwd: finished(forked(ANSWERS, json.dumps(codes)), cwd, env))
    for rank in (0, 1):
        assert f"{name if name in ENTRIES else 'others'}: works" in said(job, rank), job


@pytest.mark.weekly("changes with PyTorch alone")
def test_the_release_that_brought_an_option():
    """The pages name it; this also holds on the oldest PyTorch."""
    since = {"--signals-to-handle": "2.10", "--virtual-local-rank": "2.10"}
    since |= {"--shutdown-timeout": "2.12", "forward_sync_buffers": "2.13"}
    known = get_args_parser().format_help() + str(inspect.signature(DDP))
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    for name, first in since.items():
        assert (name in known) == (release >= tuple(map(int, first.split(".")))), name


# ---------------------------------------------------------------- programs and commands

DATA = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data, epochs = TensorDataset(torch.rand(128, 4)), 2
build_model = lambda: nn.Linear(4, 1)

def train_one_epoch(model, loader):
    for (x,) in loader:
        model(x).sum().backward()
        print(f"rank {dist.get_rank()}: {len(x)}\\n", end="", flush=True)

"""
TORCHRUN = "torchrun --standalone --nproc-per-node=2 program.py"
PROGRAMS = {  # entry: what stands above its code, the command, and lines that it prints
    "How do I make a script for one GPU": (
        f"import os\n{DATA}CODE",
        f"{TORCHRUN} && ls model.pt",
        [*["rank 0: 32"] * 4, *["rank 1: 32"] * 4, "model.pt"],
    ),
    "`mp.spawn`:": (
        "from torch import multiprocessing as mp\n\n\nCODE",
        "python program.py",
        ["rank 0 of 2", "rank 1 of 2"],
    ),
    "How do I debug one rank": (
        TRAIN.replace("dist.all_reduce", "CODEdist.all_reduce"),
        f"{TORCHRUN} <<< $'up\\np loss * 100\\nc' | grep -o -e 'tensor(.*' -e 'rank [01].*'",
        ["rank 0: 3.0", "rank 1: 3.0", "tensor(100.)"],
    ),
}


@SLOW
@pytest.mark.parametrize("start", PROGRAMS)
def test_program(start, tmp_path):
    text, command, lines = PROGRAMS[start]
    (tmp_path / "program.py").write_text(text.replace("CODE", blocks(start)[0]), encoding="utf-8")
    assert typed(command, tmp_path) == sorted(lines)


MAY_FIND_NOTHING = re.compile(r"\b(grep|pgrep|getent|find|timeout)\b")
TWO_MACHINES = re.compile(r"torchrun --nnodes=2 .*--rdzv-endpoint=HOST:\d+.*")


def commands():
    """Return the commands of all pages but Slurm's, each once, without their comments."""
    found = {}
    for block in tried():
        if block.language == "bash" and block.page != "slurm":
            code = re.sub(r"\\\n *", "", block.code)
            code = re.sub("--nproc-per-node=(gpu|4)", "--nproc-per-node=2", code)
            code = re.sub("--rdzv-endpoint=HOST:[0-9]+", "--rdzv-endpoint=HOST:29400", code)
            code = re.sub(r"(with_accelerate.py)", r"\1 1 --width=4", code)  # a short run
            for line in re.sub(r"(^|\s+)#.*", "", code, flags=re.MULTILINE).splitlines():
                found[re.sub(r"^(CUDA_VISIBLE_DEVICES=\S* )?!?", "", line.strip())] = block.title
    (settings,) = blocks("How do I debug one rank", "json")
    start = json.loads(settings)["configurations"][0]
    found[f"python -m {start['module']} {' '.join(start['args'])}"] = "VS Code"
    return {line: title for line, title in found.items() if line}


@pytest.fixture
def folder(tmp_path):
    """A reader's folder: a script, also as a package, a virtual environment, data, checkpoints."""
    dcp.save({"weight": torch.zeros(1)}, checkpoint_id=tmp_path / "FOLDER", no_dist=True)
    for path in [ROOT / "more", *ROOT.glob("0*.py")]:
        (tmp_path / path.name).symlink_to(path)
    (test,) = blocks("Is it my script, or the machine?")
    (tmp_path / "test.py").write_text(test.replace("2**24", "2"), encoding="utf-8")
    for name in ("package", "images", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(TRAIN, encoding="utf-8")
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
        if "torch" in line.split()[0] and "train.py" in line and "--redirects" not in line:
            assert any("rank 0: " in each for each in printed), (title, printed)


# ---------------------------------------------------------------- Slurm


@SLOW
@ON_A_CLUSTER
def test_slurm(cluster, folder):
    """The batch files run, and what a reader types about a job finds it."""
    lines = [line for block in tried() if block.page == "slurm" for line in block.code.splitlines()]
    first, about = blocks("How do I submit my script as a job?", "bash")
    submit, listed, shell, cancelled = about.splitlines()

    def typed_there(line, job=None):
        line = line.split("  #")[0].replace("JOB", str(job and job.number))
        return cluster.run("bash", "-c", line, cwd=folder)

    def submitted(text, program, *wanted):
        """Submit a batch file; return the job once it has printed these lines."""
        text = re.sub("--cpus-per-task=[0-9]+", "--cpus-per-task=2", text)
        text = re.sub(" --mem=[0-9]+G", "", text)  # nodes of the practice cluster are smaller
        (folder / "train.sbatch").write_text(text, encoding="utf-8")
        (folder / "train.py").write_text(program, encoding="utf-8")
        job = Submitted(cluster, folder, "train.sbatch")
        job.wait_for(lambda: set(wanted) <= set(job.stdout.splitlines()), timeout=120)
        return job

    job = submitted(first, "print('hello', flush=True)\nimport time\ntime.sleep(600)\n", "hello")
    assert str(job.number) in typed_there(listed)
    assert "Submitted batch job" in typed_there(submit)
    for line in lines:
        if line.startswith(("squeue", "scontrol show", "sinfo", "grep", "sed", "head", "mkdir")):
            typed_there(f"{line.split('  #')[0]}{' || [ $? = 1 ]' * line.startswith('grep')}", job)
    assert typed_there(shell.replace("--pty bash", "hostname"), job).startswith("node")
    (follow,) = [line for line in lines if line.startswith("tail -f")]
    followed = follow.replace("slurm-JOB.out", f"train_{job.number}.out").split("  #")[0]
    assert "hello" in typed_there(f"timeout 2 {followed} || true")
    typed_there(cancelled.replace("JOB", "--me"))

    (four,) = blocks("How do I ask for one machine with four GPUs?", "bash")
    submitted(four, TRAIN, *(f"rank {rank}: 10.0" for rank in range(4)))
    (share,) = blocks("How many CPUs and how much memory", "bash")
    (once_per_node,) = blocks("Each line is printed several times", "bash")
    (sees,) = blocks("CUDA_VISIBLE_DEVICES and LOCAL_RANK under srun", "bash")
    text = f"#!/bin/bash\n{share}#SBATCH --output=%x_%j.out\nsource .venv/bin/activate\n{sees}"
    job = submitted(text + once_per_node, TRAIN, "rank 0: 3.0", "rank 1: 3.0")
    assert re.search(r"^node\d 0: 0,1$", job.stdout, re.MULTILINE)


STOPPED = """\
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
path, loader, batches = sys.argv[1].removeprefix("--path="), range(10**6), []

def train(batch):
    if not batches:
        print(f"rank {dist.get_rank()}: trains\\n", end="", flush=True)
    batches.append(batch)
    time.sleep(0.01)

def save(epoch, step):
    if dist.get_rank() == 0:
        Path(f"{path}.interrupted").touch()

"""


@SLOW
@ON_A_CLUSTER
def test_a_job_that_is_told_to_stop_saves_and_is_requeued(cluster, folder):
    title = "My job was stopped at its time limit"
    (code,), (lines,) = blocks(title), blocks(title, "bash")
    (folder / "train.py").write_text(f"{STOPPED}{code}\nrun_epoch(0)\n", encoding="utf-8")
    options = "#SBATCH --job-name=train --output=%x_%j.out --cpus-per-task=2\n"
    text = f"#!/bin/bash\n{options}{lines.replace('--nproc-per-node=4', '--nproc-per-node=2')}"
    text = text.replace("export", "source .venv/bin/activate\nexport", 1)
    (folder / "train.sbatch").write_text(text, encoding="utf-8")
    job = Submitted(cluster, folder, "train.sbatch")
    job.wait_for(lambda: job.stdout.count(": trains") == 2)
    job.cancel("--signal=TERM")
    job.wait_for(lambda: job.show("Restarts") == "1")
    job.cancel()
