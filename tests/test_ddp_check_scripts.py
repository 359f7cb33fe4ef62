"""The checker judges scripts of other styles, and those that do not get far."""

import os
import re
import subprocess
import sys

import pytest
from support.checker import failed, fork_ranks, judged, passed
from support.jobs import free_port
from support.scripts import ROOT

from ddp_check.rules import PASS, RULES

pytestmark = pytest.mark.usefixtures("own_folder")
EVERYTHING = pytest.mark.everything
STYLES_FOLDER = ROOT / "tests" / "styles"

# ---------------------------------------------------------------- scripts of other styles

GPUS = """
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    torch.manual_seed(0)
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    data = TensorDataset(torch.randn(100, 4), torch.randint(3, (100,)))
    loader = DataLoader(data, 10, sampler=DistributedSampler(data), pin_memory=True)
    model = DDP(torch.nn.Linear(4, 3).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(1, device=f"cuda:{rank}")
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.to(rank)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item():.3f}")
            torch.save(model.module.state_dict(), "model.pt.new")
            os.replace("model.pt.new", "model.pt")
    dist.barrier(device_ids=[rank])
    torch.load("model.pt", map_location=f"cuda:{rank}")
    torch.cuda.synchronize()
    dist.destroy_process_group()


main()
"""
TRANSLATED = {
    *("torch.cuda.set_device()", '"nccl"', "pin_memory", ".to(0)", "device_ids", "GradScaler"),
    *('"cuda:0"', ".cuda()", 'autocast("cuda")', "map_location", "torch.cuda.synchronize()"),
}


@EVERYTHING
def test_a_script_for_gpus(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
    script = tmp_path / "train.py"
    script.write_text(GPUS, encoding="utf-8")
    run, verdicts = judged(script)
    assert failed(verdicts) == [], run.output
    assert verdicts["safe_loads"].status == PASS
    assert {event["call"] for event in run.all("translated")} >= TRANSLATED


@EVERYTHING
def test_a_script_that_asks_for_gpus_and_insists(tmp_path):
    """It is run as it is, and then again with its calls translated."""
    ask = "import torch\nhas_gpus = torch.cuda.is_available()\n"
    script = tmp_path / "train.py"
    script.write_text(ask + GPUS, encoding="utf-8")
    result = report(script)
    assert result.returncode == 0, result.stdout
    assert re.search("(?im)^Without a GPU, the script ended with: .*(cuda|nvidia)", result.stdout)
    assert "Translated for the CPU: torch.cuda.is_available() (train.py:2), " in result.stdout


RAN = {"it_ends", "one_group", "no_thread_left", "mean_gradients", "same_collectives"}
DDP = RAN | {"the_same_model", "training_mode", "needed_search"}
SHARED = {"shards", "new_order"}
SPOKE = {"progress", "printed_loss"}
SAVES = {"one_writer", "plain_names"}
STYLES = {  # script: the rules that pass, those that fail
    "accumulation": (
        DDP | SHARED | SPOKE | SAVES | {"equal_buffers", "randomness", "evaluation"},
        [],
    ),
    "by_hand": (RAN | SPOKE | {"the_same_model"}, []),
    "dictionaries": (DDP | SHARED | SPOKE | SAVES, []),
    "iterable": (DDP | SPOKE, []),
    "plain": (
        {"it_ends", "new_order", "plain_names"},
        ["one_group", "the_same_model", "shards", "progress", "one_writer"],
    ),
    "sharded": ((RAN | SHARED | SPOKE) - {"mean_gradients", "no_thread_left"}, []),
    "static": (DDP | SHARED, ["no_thread_left"]),
    "top_level": (DDP | SHARED | {"progress"}, ["no_thread_left"]),
}


@EVERYTHING
@pytest.mark.parametrize("name", STYLES)
def test_other_styles(monkeypatch, name):
    passes, fails = STYLES[name]
    if "no_thread_left" not in fails:  # it imports what it needs in time
        fork_ranks(monkeypatch)
    arguments = ["--output-dir", "out"] if name == "dictionaries" else []
    run, verdicts = judged(STYLES_FOLDER / f"{name}.py", *arguments, timeout=120)
    assert failed(verdicts) == fails, run.output
    assert passed(verdicts) == passes - {*fails}


@EVERYTHING
def test_in_a_test_of_your_own(tmp_path):
    """The fixture: a script that starts its processes itself passes, and one fails."""
    (tmp_path / "crash.py").write_text("raise ValueError('no data')", encoding="utf-8")
    (tmp_path / "test_train.py").write_text(
        f"""def test_passes(ddp_check):
    verdicts = ddp_check({str(STYLES_FOLDER / "spawned.py")!r})
    assert verdicts["in each epoch, the ranks share out the data"] == "pass"

def test_fails(ddp_check):
    ddp_check("crash.py", "--epochs", 2)
""",
        encoding="utf-8",
    )
    start = [sys.executable, "-m", "pytest", "-p", "ddp_check.plugin", "test_train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        start, capture_output=True, text=True, check=False, timeout=300, env=env, cwd=tmp_path
    )
    assert "1 failed, 1 passed" in result.stdout, result.stdout
    assert "the script ends: exit code 1: ValueError: no data" in result.stdout
    assert "Traceback" not in result.stdout


# ---------------------------------------------------------------- scripts that do not get far


def report(*words):
    start = [sys.executable, "-m", "ddp_check", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(start, capture_output=True, text=True, check=False, timeout=300, env=env)


def test_a_script_that_crashes(tmp_path):
    """The report of the command: the error, and no false alarm about what was not reached."""
    path = tmp_path / "train.py"
    path.write_text("import torch\nraise ValueError('no data')\n", encoding="utf-8")
    result = report(path)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "FAIL            the script ends: exit code 1: ValueError: no data"
    assert lines[-1] == f"1 FAIL, {len(RULES) - 2} not seen, 1 not applicable"
    assert result.stderr == ""


SHORT = {  # script: what is said about its end
    "import sys\nsys.exit('no config.yaml')": "no config.yaml",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": "Signal 9 (SIGKILL)",
    "open('data.pt')": "; data.pt could be a checkpoint and was left out: give its absolute path",
    "import urllib.request\nurllib.request.urlopen('http://localhost:PORT')": (
        "; it needs the network: download the data before"
    ),
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()": (
        "the following arguments are required: data; usage: train.py [-h] data"
    ),
}


@EVERYTHING
@pytest.mark.parametrize("text", SHORT)
def test_what_ended_the_script(tmp_path, text):
    (tmp_path / "data.pt").touch()
    path = tmp_path / "train.py"
    path.write_text(text.replace("PORT", free_port()), encoding="utf-8")
    _, verdicts = judged(path)
    assert verdicts["it_ends"].text.endswith(SHORT[text])
    assert failed(verdicts) == ["it_ends"]


@EVERYTHING
def test_a_script_that_never_returns(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        """import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
time.sleep(1000)
""",
        encoding="utf-8",
    )
    run, verdicts = judged(path, timeout=30)
    assert run.returncode is None
    assert "rank 0 is at train.py:5, in " in verdicts["it_ends"].text
    assert "rank 1 is at train.py:6, in " in verdicts["it_ends"].text
    assert failed(verdicts) == ["it_ends"]


def test_what_a_script_writes_stays_out_of_its_folder(tmp_path):
    """Its files are there, its checkpoints are not, and writing one of them changes a copy."""
    (tmp_path / "runs").mkdir()
    for name in ("log.txt", "runs/notes.txt", "runs/model.pt"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    path = tmp_path / "train.py"
    path.write_text(
        """import os
import torch
assert not os.path.exists("runs/model.pt")
torch.save({}, "runs/model.pt")
print(open("log.txt").read(), file=open("runs/notes.txt", "w"))
print("new", file=open("log.txt", "a"))
torch.save({}, "log.txt")
""",
        encoding="utf-8",
    )
    run, _ = judged(path, nproc=1)
    assert run.returncode == 0, run.output
    for name in ("log.txt", "runs/notes.txt", "runs/model.pt"):
        assert (tmp_path / name).read_text(encoding="utf-8") == "old"


def test_no_script(tmp_path):
    result = report(tmp_path / "missing.py")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("python -m ddp_check: error: there is no ")
