"""The code that more/lookup/ prints works: each command, and each block of Python, without a †."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from clusters import ON_A_CLUSTER, SIMPLE, Submitted
from pages import blocks, inside_sentences, tried
from support.jobs import finished, free_port, run
from support.scripts import ON_PATH, ROOT, forked

SLOW = pytest.mark.slow
TRAIN = blocks("Is it my script, or the machine?")[0].replace("2**24", "2")

# ---------------------------------------------------------------- Python

ENTRIES = {  # function of answers.py: entry
    "accumulation": "How do I accumulate gradients",
    "tokens": "Are gradients, and the loss, summed",
    "sparse": "Are gradients, and the loss, summed",
    "broadcast": "`c10d::broadcast_: an autograd kernel",
    "clipped": "Where do I clip gradients",
    "evaluation": "How do I evaluate: validation loss",
    "resume": "How do I save and resume",
    "told_to_stop": "My job was stopped at its time limit",
    "stopping": "Early stopping: one rank",
    "shortest": "It hangs at the end of an epoch",
    "skipped": "How do I skip a bad batch",
    "stream": "Every GPU gets the same data from",
    "inference": "How do I run inference",
    "archive": "Loading many small files",
    "adapters": "How do I train LoRA",
}
PACKAGES = re.compile(r"tqdm|wandb|accelerator\.|Accelerator\(|training_args|trainer\.")
PROGRAMS_OF = ("`mp.spawn`:", "How do I make a script for", "Is it my script", "How do I debug one")


@pytest.mark.parametrize("packages", [False, pytest.param(True, marks=SLOW)])
def test_python_on_two_ranks(packages, tmp_path):
    if packages:
        pytest.importorskip("peft", reason="pip install -r more/lookup/requirements.txt")
    names = [name for name in ENTRIES if (name == "adapters") == packages]
    codes = {name: blocks(ENTRIES[name]) for name in names} | {"others": []}
    for block in tried():
        here = block.language == "python" and bool(PACKAGES.search(block.code)) == packages
        if here and not block.title.startswith((*ENTRIES.values(), *PROGRAMS_OF)):
            codes["others"].append((block.title, block.code))
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    finished(forked(Path(__file__).with_name("answers.py"), json.dumps(codes)), tmp_path, env)


# ---------------------------------------------------------------- programs and commands


def typed(command, cwd, code=0):
    """Run a command as a reader would type it; return the lines that it prints, sorted."""
    env = {**ON_PATH, "HOME": str(cwd), "PIP_NO_INDEX": "1"}
    job = run(["bash", "-c", command], cwd, env)
    assert job.returncode <= code, job
    return sorted(filter(None, job.stdout.splitlines()))


DATA = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

data, epochs, build_model = torch.rand(128, 4), 2, lambda: nn.Linear(4, 1)

def train_one_epoch(model, loader):
    for x in loader:
        model(x).sum().backward()
    print(f"rank {dist.get_rank()}: {len(loader)} batches\\n", end="", flush=True)

"""
ELASTIC = "torchrun --nnodes=1:2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400"
SENTENCES = f"""\
{ELASTIC} --rdzv-conf=is_host=1 train.py & {ELASTIC} --rdzv-conf=is_host=0 train.py & wait
export GLOO_SOCKET_IFNAME=lo; torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py
TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 \
CUDA_VISIBLE_DEVICES=0,1 torchrun --virtual-local-rank --standalone --nproc-per-node=2 train.py
CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=gpu predict.py
export TMPDIR=/tmp
export HF_HOME=/scratch/$USER/hf TORCH_HOME=/scratch/$USER/torch
unset OMP_PLACES OMP_PROC_BIND GOMP_CPU_AFFINITY
ulimit -n 65536
free -h
ps -eo pid,rss,pss,cmd --sort -rss | head
kill PID
kill -9 PID
touch /dev/shm/nccl-1; rm /dev/shm/nccl-*
pip install -U torch
torchrun --standalone --nproc-per-node=2 lines.py && ls model.pt
python spawn.py
torchrun --standalone --nproc-per-node=2 debug.py <<< $'up\\np t * 50\\nc' | grep "tensor.*50"
"""  # each command inside a sentence, completed if it is an option or a variable
IN_THE_BATCH_FILE = """\
#SBATCH --export=NONE --partition=gpu --account=group --mem=200G --gres=gpu:4
export SLURM_EXPORT_ENV=ALL
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
source .venv/bin/activate
srun bash train.sh
"""
ABOUT_A_HELD_JOB = "scontrol update job=JOB ExcNodeList=NODE && scontrol release JOB"
MAY_FAIL = re.compile(r"^(?!.*<<<).*\b(grep|pgrep|getent|timeout|ulimit)\b")


def test_each_command_inside_a_sentence_is_run_or_marked():
    printed = "".join(block.code for block in tried() if block.language == "bash")
    known = f"{printed}{SENTENCES}{IN_THE_BATCH_FILE}{ABOUT_A_HELD_JOB}"
    assert [command for command in inside_sentences() if command not in known] == []


def commands(pages):
    """Return the commands of these pages, or in sentences, each once, without their comments."""
    bash = [block for block in tried() if block.language == "bash"]
    code = "".join(block.code for block in bash if re.match(pages, block.page))
    if pages == "sentences":
        start = json.loads(blocks("How do I debug one rank", "json")[0])["configurations"][0]
        code = f"{SENTENCES}python -m {start['module']} {' '.join(start['args'])}\n"
    for pattern, new in (
        (r"\\\n *", ""),
        ("--nproc-per-node=(gpu|4)", "--nproc-per-node=2"),
        ("--rdzv-endpoint=HOST:[0-9]+", "--rdzv-endpoint=HOST:29400"),
        ("with_accelerate.py", "with_accelerate.py 1 --width=4"),  # a short run
        (r"(^|\s+)#.*|^(CUDA_VISIBLE_DEVICES=\S* )?!?", ""),
    ):
        code = re.sub(pattern, new, code, flags=re.MULTILINE)
    return list(dict.fromkeys(filter(None, map(str.strip, code.splitlines()))))


@pytest.fixture
def folder(tmp_path):
    """A reader's folder: a script, also as a package, a virtual environment, data, checkpoints."""
    dcp.save({"weight": torch.zeros(1)}, checkpoint_id=tmp_path / "FOLDER", no_dist=True)
    for path in [ROOT / "more", *ROOT.glob("0*.py")]:
        (tmp_path / path.name).symlink_to(path)
    for name in ("package", "images", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    files = dict.fromkeys(("train.py", "test.py", "predict.py", "package/train.py"), TRAIN)
    files["lines.py"] = DATA + blocks("How do I make a script for")[0]
    files["spawn.py"] = f"import torch.multiprocessing as mp\n{blocks('`mp.spawn`:')[0]}"
    stop = blocks("How do I debug one rank")[0]
    files["debug.py"] = TRAIN.replace("dist.all_reduce", f"{stop}dist.all_reduce")
    files |= {"train.sh": "echo from train.sh"}
    files[".venv/bin/activate"] = f"export PATH={ON_PATH['PATH']}\n"
    files[".venv/bin/python"] = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    return tmp_path


@SLOW
@pytest.mark.parametrize("pages", ["[a-g]", "(?!slurm)[h-z]", "sentences"])
def test_each_command(pages, folder):
    for line in commands(pages):
        assert not re.search("[…]|[.]{3}", line), line
        shown = line.replace("HOST", "127.0.0.1").replace("29400", free_port())
        shown = shown.replace("/dev/shm/nccl", f"{folder}/nccl")  # others may be using theirs
        if "PID" in line:
            shown = f"sleep 60 & {shown.replace('PID', '$!')} || exit 1; kill $! || true"
        if "--nnodes=2" in line:
            shown = shown.replace("--nproc-per-node=2", "--nproc-per-node=1")
            shown = f"{shown} & {shown} & wait"
        printed = typed(shown, folder, code=bool(MAY_FAIL.search(line)))
        if re.search("torch.* t[a-z]+.py", line) and not re.search("redirects|nohup", line):
            assert any("rank 0: " in each for each in printed), (line, printed)


# ---------------------------------------------------------------- Slurm


ABOUT_JOBS = "squeue|scontrol show|sinfo|grep|sed|head|mkdir|tail|sbatch|srun --jobid"


@SLOW
@ON_A_CLUSTER
def test_slurm(cluster, folder):
    """The batch files run, and what a reader types about a job finds it."""

    def submitted(text, program=TRAIN, options=(), prints=()):
        """Submit a batch file, for smaller nodes; return the job when it has printed these."""
        heading = "" if text.startswith("#!") else "#!/bin/bash\n#SBATCH --output=%x_%j.out\n"
        text = heading + re.sub("--mem=([0-9]+)G", r"--mem=\1M", text)
        (folder / "train.sbatch").write_text(text, encoding="utf-8")
        (folder / "train.py").write_text(program, encoding="utf-8")
        job = Submitted(cluster, folder, *options, "train.sbatch")
        job.wait_for(lambda: all(text in job.stdout for text in prints), timeout=120)
        return job

    def typed_there(line, job):
        line = line.replace("slurm-JOB", "train_JOB").replace("JOB", str(job.number))
        return cluster.run("bash", "-c", line.replace("=NODE", "=node2"), cwd=folder)

    first, about = blocks("How do I submit my script as a job?", "bash")
    sleeps = "print('hello', flush=True)\nimport time\ntime.sleep(600)\n"
    job, printed = submitted(first, sleeps, prints=["hello"]), ""
    code = "".join(block.code for block in tried() if block.page == "slurm")
    for line, program in re.findall(f"^(({ABOUT_JOBS}) .*?)(?:  #.*)?$", code, re.MULTILINE):
        ends = {"grep": 1, "tail": 124}.get(program, 0)
        shown = f"timeout 5 {line.replace('--pty bash', 'hostname')} || [ $? = {ends} ]"
        printed += typed_there(shown, job)
    for expected in str(job.number), "Submitted batch job", "hello", "node1\n":
        assert expected in printed
    typed_there(about.splitlines()[-1].replace("JOB", "--me"), job)

    held = submitted(IN_THE_BATCH_FILE, options=["--hold"])
    typed_there(ABOUT_A_HELD_JOB, held)
    held.wait_for(lambda: "from train.sh" in held.stdout)
    assert held.show("ExcNodeList") == "node2"
    (four,) = blocks("How do I ask for one machine with four GPUs?", "bash")
    submitted(four, prints=[f"rank {rank}: [4.0]" for rank in range(4)])
    (share,) = blocks("How many CPUs and how much memory", "bash")
    (once_per_node,) = blocks("Each line is printed several times", "bash")
    (sees,) = blocks("CUDA_VISIBLE_DEVICES and LOCAL_RANK under srun", "bash")
    text = f"{share}source .venv/bin/activate\n{sees}{once_per_node}"
    job = submitted(text, prints=["rank 0: [2.0]", "rank 1: [2.0]"])
    assert re.search(r"^node\d 0: 0,1$", job.stdout, re.MULTILINE)

    (requeues,) = blocks("My job was stopped at its time limit", "bash")
    job = submitted(requeues.replace("export", "source .venv/bin/activate\nexport", 1), SIMPLE)
    job.wait_for(lambda: job.stdout.count("finds") == 4)
    job.cancel("--signal=TERM")
    job.wait_for(lambda: job.show("Restarts") == "1")
    job.cancel()
