"""The checker judges scripts of other styles, and scripts that fail early."""

import os
import random
import re
import subprocess
import sys

import pytest
import torch
from checking import drill_passes, failed, fork_ranks, judged, line_of, passed, told
from ddp_check import events
from ddp_check.report import perform, planned
from ddp_check.rules.base import FRAGILE, NONE, PASS, SLOW, UNSEEN, UNSURE, WRONG
from support.scripts import ROOT, write

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]
STYLES_FOLDER = ROOT / "checker" / "tests" / "styles"

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
    torch.cuda.init()
    seeded = torch.Generator(device="cuda").manual_seed(0)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.randn(4, device=rank, generator=seeded)
    end.record()
    torch.cuda.synchronize()
    assert isinstance(seeded, torch.Generator) and start.elapsed_time(end) >= 0
    dist.destroy_process_group()


main()
"""
TRANSLATED = {
    *("torch.cuda.set_device()", '"nccl"', "pin_memory", ".to(0)", "device_ids", "GradScaler"),
    *("torch.cuda.init()", "torch.Generator(device)", "a stream or an event"),
    *('"cuda:0"', ".cuda()", 'autocast("cuda")', "map_location", "torch.cuda.synchronize()"),
}


def test_a_script_for_gpus(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
    script = tmp_path / "train.py"
    script.write_text(GPUS, encoding="utf-8")
    run, verdicts = judged(script)
    assert failed(verdicts) == [], run.output
    assert verdicts["safe_loads"].status == PASS
    assert {event.call for event in run.all(events.Translated)} >= TRANSLATED


def test_a_script_that_asks_for_gpus_and_insists(tmp_path):
    """It is run unchanged first, and then again with its calls translated."""
    ask = "import torch\nhas_gpus = torch.cuda.is_available()\n"
    script = tmp_path / "train.py"
    script.write_text(ask + GPUS, encoding="utf-8")
    result = report(script)
    assert result.returncode == 0, result.stdout
    assert re.search("(?im)^Without a GPU, the script ended with: .*(cuda|nvidia)", result.stdout)
    assert "Translated for the CPU: torch.cuda.is_available() (train.py:2), " in result.stdout


RAN = {"script_ends", "one_group", "no_thread_left", "gradients_are_averaged", "same_collectives"}
RAN |= {"values_are_finite", "rates_are_equal"}
DDP = RAN | {"weights_agree", "training_mode", "unused_search_is_needed"}
SHARED = {"ranks_share_data", "order_changes"}
SPOKE = {"one_rank_prints", "printed_loss_is_of_all"}
SAVES = {"one_rank_writes", "plain_names"}
LOOKED = {"each_sample_is_evaluated_once", "evaluation_mode", "one_rank_prints"}
STYLES = {  # script: the rules that pass, and the others that the report shows
    "accumulation": (
        DDP | SHARED | SAVES | LOOKED | {"evaluated_models_agree", "random_numbers_differ"},
        {},
    ),
    "by_hand": (RAN | SPOKE | {"weights_agree"}, {}),
    "dictionaries": (DDP | SHARED | SPOKE | SAVES, {}),
    "forked": (DDP | SHARED | SAVES | {"random_numbers_differ"}, {}),
    "gan": (
        (DDP | SHARED | SPOKE | {"random_numbers_differ"}) - {"gradients_are_averaged"},
        {"gradients_are_averaged": SLOW},
    ),
    "iterable": (DDP | SPOKE | {"ranks_share_data"}, {"order_changes": UNSURE}),
    "plain": (
        {"script_ends", "order_changes", "plain_names"},
        {
            **dict.fromkeys(
                ("one_group", "weights_agree", "ranks_share_data", "one_rank_writes"), WRONG
            ),
            **dict.fromkeys(("one_rank_prints", "printed_loss_is_of_all"), UNSURE),
        },
    ),
    "rest": (
        (
            DDP
            | SHARED
            | LOOKED
            | {"evaluated_models_agree", "own_gpu", "held_out_is_not_trained_on"}
        )
        - {"no_thread_left"},
        {},
    ),
    "sharded": ((RAN | SHARED | SPOKE) - {"gradients_are_averaged", "no_thread_left"}, {}),
    "static": (DDP | SHARED, {"no_thread_left": FRAGILE}),
    "steps": (DDP | SPOKE | {"ranks_share_data"}, {}),
    "synced": ((DDP | SHARED | SPOKE | {"own_gpu"}) - {"no_thread_left"}, {"one_group": FRAGILE}),
    "top_level": (
        DDP | SHARED | {"one_rank_prints"},
        {"no_thread_left": FRAGILE, "printed_loss_is_of_all": UNSURE},
    ),
    "workers": (DDP | SHARED | LOOKED | {"random_numbers_differ"}, {}),
}


@pytest.mark.parametrize("name", STYLES)
def test_other_styles(monkeypatch, name):
    passes, others = STYLES[name]
    if torch.__version__ < "2.9":  # it does not name gloo's threads
        others = {rule: status for rule, status in others.items() if rule != "no_thread_left"}
    if "no_thread_left" not in STYLES[name][1]:  # it imports what it needs early enough
        fork_ranks(monkeypatch)
    arguments = ["--output-dir", "out"] if name == "dictionaries" else []
    run, verdicts = judged(STYLES_FOLDER / f"{name}.py", *arguments, timeout=300)
    assert told(verdicts) == others, run.output
    assert passed(verdicts) >= passes - {*others}


FRAMEWORKS = {  # script: the package that it needs, and what the report shows beside passes
    "accelerated": ("accelerate", {}),
    "fabric": ("lightning_fabric", {}),
    "trainer": ("transformers", {"random_numbers_differ": UNSURE}),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name):
    package, others = FRAMEWORKS[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    run, verdicts = judged(STYLES_FOLDER / f"{name}.py", timeout=200)
    assert told(verdicts) == others, run.output
    last = set() if run.returncode else {"weights_agree"}  # not told if a rank aborts at its exit
    assert passed(verdicts) >= {"script_ends", "gradients_are_averaged", "ranks_share_data", *last}


FSDP = (
    "torch.nn.parallel import DistributedDataParallel",
    "torch.distributed.fsdp import fully_shard",
)
SAME_SEED = ("(1337 + dist.get_rank())", "(1337)")
WRONG_BY_ONE_LINE = {  # what is wrong: script, changes, line, and what the report says of it
    "same batches": ("steps", [SAME_SEED], "optimizer.step()", {"ranks_share_data": WRONG}),
    "same batches, sharded": (
        "steps",
        [FSDP, SAME_SEED],
        "optimizer.step()",
        {"ranks_share_data": WRONG},
    ),
    "same augmentation": (
        *("workers", [("(1000 * dist.get_rank())", "(1000)")]),
        *("for inputs, targets in loader:", {"random_numbers_differ": WRONG}),
    ),
    "same dropout": (
        "forked",
        [("seed(rank)", "seed(1)")],
        "optimizer.step",
        {"random_numbers_differ": UNSURE},
    ),
    "padding kept": (
        *("workers", [("    guesses = guesses[: len(data)]\n", "")]),
        *("for x, _ in DataLoader(", {"each_sample_is_evaluated_once": UNSURE}),
    ),
    "evaluated in training mode": (
        *("workers", [("    model.eval()\n", "")]),
        *("guesses.append(", {"evaluation_mode": WRONG}),
    ),
    "one GPU": ("rest", [(":{rank}", ":0")], "model = DDP(", {"own_gpu": WRONG}),
    "no such GPU": ("rest", [(":{rank}", ":{rank + 1}")], "model = DDP(", {"own_gpu": WRONG}),
    "the rest left out": (
        *("rest", [("range(len(sampler) * dist.get_world_size(), len(data))", "range(0)")]),
        *("for x, y in DataLoader(", {"each_sample_is_evaluated_once": WRONG}),
    ),
    "the split by rank": (
        *("rest", [("manual_seed(0))\n    loader", "manual_seed(rank))\n    loader")]),
        *(
            "for x, y in DataLoader(",
            {"held_out_is_not_trained_on": WRONG, "ranks_share_data": WRONG},
        ),
    ),
    "a layer too wide": (
        *("synced", [("Linear(8, 3)", "Linear(9, 3)")]),
        *("loss = cross_entropy(", {"script_ends": WRONG, "one_group": FRAGILE}),
    ),
    "a graph": (
        *("rest", [("    dist.barrier()", "    torch.cuda.CUDAGraph()")]),
        *("torch.cuda.CUDAGraph()", {"script_ends": UNSURE}),
    ),
}


@pytest.mark.parametrize("name", WRONG_BY_ONE_LINE)
def test_wrong_by_one_line(tmp_path, monkeypatch, name):
    fork_ranks(monkeypatch)
    style, changes, line, says = WRONG_BY_ONE_LINE[name]
    text = (STYLES_FOLDER / f"{style}.py").read_text(encoding="utf-8")
    run, verdicts = judged(write(tmp_path / "train_multi_gpu.py", text, changes), timeout=300)
    assert told(verdicts) == says, (run.output, verdicts["script_ends"])
    assert line_of(verdicts[next(iter(says))]).startswith(line)


def test_nccl_may_be_named_in_another_file(tmp_path, monkeypatch):
    """gloo's threads are no fault of a script that is for NCCL."""
    fork_ranks(monkeypatch)
    (tmp_path / "settings.py").write_text('BACKEND = "nccl"', encoding="utf-8")
    changes = [
        ('group("gloo"', "group(BACKEND"),
        ("import os\n", "import os\nfrom settings import *\n"),
    ]
    text = (STYLES_FOLDER / "static.py").read_text(encoding="utf-8")
    run, verdicts = judged(write(tmp_path / "train.py", text, changes), translate="yes")
    assert told(verdicts) == {}, run.output
    assert verdicts["no_thread_left"].status == NONE


def test_a_library_that_does_not_work_here(tmp_path):
    """That is no fault of the script."""
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    (libraries / "broken.py").write_text("raise RuntimeError('no operator')", encoding="utf-8")
    path = tmp_path / "train.py"
    path.write_text(
        f"import sys\nsys.path.append({str(libraries)!r})\nimport broken\n", encoding="utf-8"
    )
    _, verdicts = judged(path)
    assert told(verdicts) == {"script_ends": UNSURE}
    assert "no operator; run the checker in the environment" in verdicts["script_ends"].text


def test_a_hang_after_the_group_is_destroyed_is_told_apart(tmp_path, monkeypatch):
    """gloo's threads can hang while Python frees the model: the script's collectives are right."""
    fork_ranks(monkeypatch)
    leave = "    dist.destroy_process_group()\n"
    wait = "    while hang:\n        __import__('time').sleep(9)\n"
    hang = f"    hang = dist.get_rank() == 1\n{leave}{wait}"
    text = (STYLES_FOLDER / "steps.py").read_text(encoding="utf-8")
    run, verdicts = judged(write(tmp_path / "train.py", text, [(leave, hang)]), timeout=15)
    assert told(verdicts) == {"script_ends": WRONG}, run.output
    assert verdicts["script_ends"].page == "handler_holds_model"
    assert "rank 0 has ended; rank 1 is at train.py:30, in main. " in verdicts["script_ends"].text


@pytest.mark.parametrize(
    ("option", "severity"),
    [("local_rank", WRONG), ("local-rank", FRAGILE)],
)
def test_a_local_rank_from_the_command_line(tmp_path, option, severity):
    """As torch.distributed.launch passes it. Each rank evaluates all samples, in its own order."""
    ask = f"""    parser = argparse.ArgumentParser()
    parser.add_argument("--{option}", type=int)
    rank = parser.parse_args().local_rank
"""
    changes = [
        ('    rank = int(os.environ["LOCAL_RANK"])\n', ask),
        ("import os\n", "import argparse\n"),
        ("8, sampler=sampler)", "8, shuffle=True)"),
    ]
    text = (STYLES_FOLDER / "rest.py").read_text(encoding="utf-8")
    run, verdicts = judged(write(tmp_path / "train.py", text, changes), timeout=300)
    assert told(verdicts) == {"script_ends": severity}, run.output
    assert line_of(verdicts["script_ends"]).startswith("parser.add_argument(")
    assert f"it needs --{option}, which " in verdicts["script_ends"].text
    assert verdicts["each_sample_is_evaluated_once"].text == "21 samples"


JOINS = """import os
import torch.distributed as dist
assert os.environ["PYTHONPATH"].endswith(":mine")
dist.init_process_group("gloo")
dist.destroy_process_group()
"""


def test_a_variable_of_the_script_leaves_the_observer_in_place(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(JOINS, encoding="utf-8")
    result = report("--env", "PYTHONPATH=mine", "--nproc", "1", path)
    assert re.search("^pass +one process group", result.stdout, re.MULTILINE), result.stdout


# ---------------------------------------------------------------- drills

BY_ARGUMENT = ("start = last_epoch()", "start = last_epoch() if sys.argv[1:] else FIRST")
LAST_BY_NAME = ("max(epochs", "max(map(int, sorted(map(str, epochs))[-1:])")
OTHER_NAMES = ('load_state_dict(state["model"])', "load_state_dict({})")
FORGETS = ('        optimizer.load_state_dict(state["optimizer"])\n', "")
NOT_FINITE = ("    data = Tens", '    x[3] = float("nan")\n    data = Tens')
DRAWN = [  # as nanoGPT does: no DataLoader, no dropout
    ("nn.Dropout(0.1), ", ""),
    ("        loader.sampler.set_epoch(epoch)\n", ""),
    ("targets in loader:\n", "targets in ((x, x.argmax(dim=1)) for x in torch.randn(4, 10, 4)):\n"),
]
RESUMED = {  # changes, arguments of the restart, what a drill's verdict says
    "dropout": ([], None, UNSURE, "the optimizer is restored, the random numbers"),
    "random batches": (DRAWN, None, UNSURE, "the optimizer is restored, the random numbers"),
    "no optimizer": ([FORGETS], None, WRONG, "the optimizer starts again without its state"),
    "by argument": ([BY_ARGUMENT], None, UNSURE, "it loads nothing and begins again at step 0"),
    "with its argument": ([BY_ARGUMENT], ["again"], UNSURE, "the optimizer is restored"),
    "names": ([OTHER_NAMES], None, WRONG, "DistributedDataParallel|Sequential: Missing key"),
    "not finite": ([NOT_FINITE], None, WRONG, "is not finite, so no run can be compared"),
    "by name": ([LAST_BY_NAME], None, WRONG, "although .* of them were saved"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_kill(tmp_path, monkeypatch, name):
    fork_ranks(monkeypatch)
    changes, restart, status, text = RESUMED[name]
    monkeypatch.setattr(random, "randrange", lambda steps: steps - 10)  # late in the run
    source = (STYLES_FOLDER / "resumes.py").read_text(encoding="utf-8")
    script = write(
        tmp_path / "train.py", source, [("import os\n", "import os\nimport sys\n"), *changes]
    )
    with planned(script, restart_arguments=restart, timeout=300) as plan:
        found = [verdict for _, verdict in perform("kill", plan) if verdict.status != PASS]
    assert found[0].status == status
    assert re.search(text, found[0].text)


def test_world_size_without_a_seed(tmp_path, monkeypatch):
    """Both runs start from the same weights; the data is another matter."""
    fork_ranks(monkeypatch)
    text = (STYLES_FOLDER / "static.py").read_text(encoding="utf-8")
    seed = "    torch.manual_seed(0)\n"
    unseeded = (seed, "    torch.seed()\n    draw = torch.Generator().manual_seed(0)\n")
    same_data = [("(101, 4)", "(101, 4, generator=draw)"), ("(101,)", "(101,), generator=draw")]
    with planned(write(tmp_path / "train.py", text, [unseeded, *same_data])) as plan:
        assert [one.status for _, one in perform("world-size", plan)] == [PASS] * 4
    with planned(write(tmp_path / "unseeded.py", text, [unseeded])) as plan:
        (_, verdict), _ = perform("world-size", plan)
    assert (verdict.status, verdict.text) == (UNSEEN, "the data differs from run to run: seed it")


def test_world_size_with_sync_batchnorm(monkeypatch):
    """On the CPU, too, it takes the statistics of all ranks."""
    fork_ranks(monkeypatch)
    with planned(STYLES_FOLDER / "synced.py", timeout=300) as plan:
        drill_passes(plan, "world-size")


# ---------------------------------------------------------------- scripts that fail early


def report(*words):
    start = [sys.executable, "-m", "ddp_check", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "checker")}
    return subprocess.run(start, capture_output=True, text=True, check=False, timeout=300, env=env)


def test_a_script_that_never_returns(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
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
    assert "rank 0 is at train.py:5, in " in verdicts["script_ends"].text
    assert "rank 1 is at train.py:6, in " in verdicts["script_ends"].text
    assert failed(verdicts) == ["script_ends"]


def test_what_a_script_writes_stays_out_of_its_folder(tmp_path):
    """Its files are there, its checkpoints are not, and writing to a file changes only a copy."""
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
