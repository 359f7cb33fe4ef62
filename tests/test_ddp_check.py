"""check.py judges scripts: ours, those that the pitfalls break, and scripts of other styles."""

import dataclasses
import os
import random
import re
import subprocess
import sys

import check
import check_run
import patches
import pytest
from check_rules import BROKEN, FAIL, PASS, RULES
from support.jobs import free_port
from support.results import same_bits
from support.scripts import LONG, ROOT, SCRIPT, SMALL, on_screen, write

EVERYTHING = pytest.mark.everything
HERE = ROOT / "tests"
PITFALLS = ROOT / "diffs" / "pitfalls"
FAILS = {  # pitfall: what is said of the rules that it fails
    "accumulation_undivided": {"gradients": "4 batches all-reduce their gradients"},
    "accumulation_without_no_sync": {"gradients": "4 batches all-reduce their gradients"},
    "batchnorm_of_rank_0": {"equal_buffers": "they differ from rank to rank"},
    "collective_on_one_rank": {
        "it_ends": "rank 0 is at .* in all_reduce; rank 1 is at .* in barrier",
        "collectives": "rank 0 calls all_reduce .* rank 1 calls barrier",
    },
    "destroy_missing": {"one_group": "rank 0 did not call destroy_process_group"},
    "edit_on_one_rank": {"the_same_model": "before step 1, the weights differ from rank to rank"},
    "eval_never_undone": {"training_mode": "step 103 is taken in evaluation mode"},
    "every_rank_saves": {"files": "ranks 0, 1 write checkpoint.pt.new"},
    "find_unused_without_need": {"warnings": "every parameter is used in each step"},
    "fixed_port": {"one_group": "the port is always 12355"},
    "forward_through_module": {
        "the_same_model": "before step 103, the weights differ from rank to rank",
        "gradients": "the gradients differ from rank to rank; the model is called without",
    },
    "handler_holds_model": {"threads": "let nothing hold the DDP model"},
    "late_import": {"threads": "import torch.distributed.nn at the top"},
    "late_set_epoch": {"new_order": "epochs 1 and 2 have the same order"},
    "module_prefix_saved": {"keys": "a key is module.0.weight"},
    "no_sampler": {"shards": "each rank trains on the same 12942 samples"},
    "no_set_epoch": {"new_order": "epochs 1 and 2 have the same order"},
    "optimizer_of_other_parameters": {"the_same_model": "changes 2 parameters that are in no wrap"},
    "os_exit": {"one_group": "leaves by os._exit: atexit functions are not called"},
    "padded_evaluation": {"evaluation": "it counts 360 samples, of which 359 differ, of 359"},
    "prints_on_every_rank": {"progress": "ranks 0 and 1 print"},
    "rank_0_evaluates_the_wrapper": {"it_ends": "rank 0 is at .* rank 1 is at .* in barrier"},
    "rank_seeds_split_data": {"shards": r"3[0-4]\d\d samples are seen by several"},  # a quarter
    "same_augmentation": {"randomness": "all ranks have the same dropout or augmentation"},
    "shuffle_beside_sampler": {"it_ends": "exit code 1: ValueError: "},
    "split_differs_by_rank": {"shards": "the same index means different samples"},
    "uneven_batches": {"it_ends": "exit code 1: RuntimeError: "},
    "unused_parameters": {"it_ends": "exit code 1: RuntimeError: "},
    "written_in_place": {"files": "a crash during the save leaves half a file"},
}
MAY_FAIL = ("every_rank_saves", "handler_holds_model", "late_import")  # then it does not end well
HANG = ("collective_on_one_rank", "rank_0_evaluates_the_wrapper")
DRILLED = {  # pitfall: the drill that fails
    "epoch_starts_again": "sigterm",
    "resume_without_optimizer": "kill",
    "sigterm_with_workers": "sigterm",
    "weights_only_false": "kill",
}
REMEDIES = {  # pitfall: what makes its script right
    "rank_0_evaluates_the_wrapper": ("(trainer.model,", "(trainer.model.module,"),
    "same_augmentation": ("+ self.epochs_run)", "+ self.epochs_run + 1000 * dist.get_rank())"),
    "unused_parameters": ("DDP(model)", "DDP(model, find_unused_parameters=True)"),
}
QUICK = ("forward_through_module", "no_sampler", "no_set_epoch")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder of its own: the checker looks for a script's files in the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def named(verdicts):
    """Return the verdicts of all rules by the names of the rules."""
    found = {rule.__name__: verdict for rule, (_, verdict) in zip(RULES, verdicts)}
    assert [verdict for verdict in found.values() if BROKEN in verdict.text] == []
    return found


def judged(script, *arguments, **options):
    """Return the run of a script and its verdicts by the names of the rules."""
    run, verdicts = check.check(script, arguments, **options)
    return run, named(verdicts)


def failed(verdicts):
    return [name for name, verdict in verdicts.items() if verdict.status == FAIL]


# ---------------------------------------------------------------- our scripts

UNSHOWN = {"equal_buffers", "loads", "randomness", "beyond"}
APPLY = {  # drills
    "02": ["kill"],
    "03": ["kill", "world-size"],
    "04": ["kill", "sigterm", "world-size"],
    "05": ["kill", "sigterm", "world-size"],
}


def plan_with(nproc, tmp_path_factory):
    """Run step 5 under observation."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "here")
        patch.setenv("OMP_NUM_THREADS", "1")
        plan = check_run.Plan(SCRIPT["05"], LONG, nproc, 300, None, folder)
        assert plan.undisturbed.returncode == 0, plan.undisturbed.output
    return plan


@pytest.fixture(scope="module")
def plan_of_05(tmp_path_factory):
    return plan_with(2, tmp_path_factory)


@pytest.fixture(scope="module")
def plan_of_one(tmp_path_factory):
    return plan_with(1, tmp_path_factory)


def test_our_last_step_passes(plan_of_05):
    verdicts = named(check.judge(plan_of_05.undisturbed))
    assert failed(verdicts) == []
    assert {name for name, verdict in verdicts.items() if verdict.status != PASS} == UNSHOWN


@EVERYTHING
def test_observation_changes_no_bit(plan_of_05, trained):
    """Nor does it leave a file behind."""
    here = check_run.Path(plan_of_05.folder, "undisturbed")
    assert same_bits(here / "checkpoint.pt", trained("05", *LONG))
    assert os.listdir(here) == ["checkpoint.pt"]


def test_whatever_is_missing_each_rule_has_a_verdict(plan_of_05):
    """Ranks that never join, kinds of events that are not there, and runs cut short anywhere."""
    run, chance = plan_of_05.undisturbed, random.Random(0)
    kinds = {event["kind"] for event in run.ranks[0]}
    assert kinds >= {"start", "init", "wrap", "pass", "batch", "step", "save", "final", "exit"}
    less = [{}, {0: run.ranks[0]}, {1: run.ranks[1]}, {0: [], 1: run.ranks[1]}]
    for kind in kinds:
        left = {r: [e for e in of if e["kind"] != kind] for r, of in run.ranks.items()}
        less += [left, {**run.ranks, 0: left[0]}, {**run.ranks, 1: left[1]}]
    for _ in range(10):
        less.append({r: of[: chance.randrange(len(of))] for r, of in run.ranks.items()})
    for ranks in less:
        for code in (0, 1, None):
            named(check.judge(dataclasses.replace(run, ranks=ranks, returncode=code)))


@EVERYTHING
@pytest.mark.parametrize("step", ["02", "03", "04"])
def test_our_scripts_pass(step, tmp_path):
    """All rules, and the drills that apply: 02 and 03 do not handle SIGTERM."""
    with check.planned(SCRIPT[step], LONG, 2, 300, None) as plan:
        verdicts = named(check.judge(plan.undisturbed))
        assert failed(verdicts) == [], plan.undisturbed.output
        unseen = {name for name, verdict in verdicts.items() if verdict.status != PASS}
        assert unseen - UNSHOWN <= {"evaluation"}
        drills_pass(plan, APPLY[step])
        if step == "02":
            ((_, verdict),) = check.perform("sigterm", plan)
            assert re.fullmatch(r"nothing handles SIGTERM: \d+ steps are lost", verdict.text)


def drills_pass(plan, names):
    for name in names:
        verdicts = check.perform(name, plan)
        assert [verdict for _, verdict in verdicts if verdict.status != PASS] == []
        assert "you may rely on it" in check.conclude(name, verdicts)


@EVERYTHING
def test_our_last_step_passes_the_drill(plan_of_05):
    drills_pass(plan_of_05, APPLY["05"])


# ---------------------------------------------------------------- pitfalls


def read(name):
    return patches.read(ROOT, PITFALLS / f"{name}.diff")


def broken(tmp_path, name):
    path = tmp_path / read(name).new
    path.write_text(read(name).result, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else EVERYTHING) for name in FAILS]
)
def test_pitfall(tmp_path, plan_of_05, name):
    """What fails is what the pitfall breaks; step 5 does not fail."""
    timeout = 40 if name in HANG else 200
    run, verdicts = judged(broken(tmp_path, name), "2", *SMALL, timeout=timeout)
    if name in MAY_FAIL:
        verdicts.pop("it_ends")
    assert failed(verdicts) == [*FAILS[name]], run.output
    assert failed(named(check.judge(plan_of_05.undisturbed))) == []
    for rule, said in FAILS[name].items():
        assert re.search(said, verdicts[rule].text)
    if f"test_pitfall[{name}]" in read(name).tests:  # without a test of its own
        assert all(text in run.output for text in on_screen(f"pitfalls/{name}")), run.output
    page = (PITFALLS / "README.md").read_text(encoding="utf-8")
    links = [verdict.pitfall for verdict in verdicts.values() if verdict.pitfall]
    assert all(f'id="pitfall-{link}"' in page for link in links)


@EVERYTHING
@pytest.mark.parametrize("name", REMEDIES)
def test_remedy(tmp_path, name):
    path = write(tmp_path / read(name).new, read(name).result, [REMEDIES[name]])
    run, verdicts = judged(path, "2", *SMALL)
    assert failed(verdicts) == [], run.output
    assert name != "same_augmentation" or verdicts["randomness"].status == PASS
    assert on_screen("pitfalls/find_unused_without_need")[0] not in run.output


@EVERYTHING
@pytest.mark.parametrize(("name", "drill"), DRILLED.items())
def test_a_pitfall_fails_its_drill(tmp_path, plan_of_one, name, drill):
    """In one process, which these pitfalls do not need more of."""
    with check.planned(broken(tmp_path, name), LONG, 1, 300, None) as plan:
        plan.undisturbed = plan_of_one.undisturbed  # none of these pitfalls shows in it
        verdicts = check.perform(drill, plan)
    assert FAIL in {verdict.status for _, verdict in verdicts}, verdicts
    assert "do not rely on it" in check.conclude(drill, verdicts)


def table():
    """Return the table of pitfalls and what the checker says, as Markdown."""
    titles = {rule.__name__: rule.__doc__ for rule in RULES}
    lines = ["| pitfall | fails |", "|---|---|"]
    found = {name: "; ".join(titles[rule] for rule in rules) for name, rules in FAILS.items()}
    found |= {name: f"`--drill {drill}`" for name, drill in DRILLED.items()}
    for name, fails in sorted(found.items()):
        page = f"../diffs/pitfalls/README.md#pitfall-{name.replace('_', '-')}"
        lines.append(f"| [{name}]({page}) | {fails} |")
    every = {path.stem for path in PITFALLS.glob("*.diff")}
    unseen = ", ".join(f"{name}" for name in sorted(every - {*found}))
    return "\n".join([*lines, "", f"Not seen: {unseen}."])


def test_the_table_is_on_the_page():
    """To see it: `python -c "import test_check; print(test_check.table())"` in this folder."""
    assert table() in (HERE / "README.md").read_text(encoding="utf-8")


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
def test_a_script_for_gpus(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GPUS, encoding="utf-8")
    run, verdicts = judged(script)
    assert failed(verdicts) == [], run.output
    assert verdicts["loads"].status == PASS
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


RAN = {"it_ends", "one_group", "threads", "gradients", "collectives"}
DDP = RAN | {"the_same_model", "training_mode", "warnings"}
SHARED = {"shards", "new_order"}
SPOKE = {"progress", "printed_loss"}
SAVES = {"files", "keys"}
STYLES = {  # script: the rules that pass, those that fail
    "accumulation": (
        DDP | SHARED | SPOKE | SAVES | {"equal_buffers", "randomness", "evaluation"},
        [],
    ),
    "by_hand": (RAN | SPOKE | {"the_same_model"}, []),
    "dictionaries": (DDP | SHARED | SPOKE | SAVES, []),
    "iterable": (DDP | SPOKE, []),
    "plain": (
        {"it_ends", "new_order", "keys"},
        ["one_group", "the_same_model", "shards", "progress", "files"],
    ),
    "sharded": ((RAN | SHARED | SPOKE) - {"gradients", "threads"}, []),
    "static": (DDP | SHARED, ["threads"]),
    "top_level": (DDP | SHARED | {"progress"}, ["threads"]),
}


@EVERYTHING
@pytest.mark.parametrize("name", STYLES)
def test_other_styles(name):
    arguments = ["--output-dir", "out"] if name == "dictionaries" else []
    run, verdicts = judged(HERE / "styles" / f"{name}.py", *arguments, timeout=120)
    passes, fails = STYLES[name]
    assert failed(verdicts) == fails, run.output
    assert {name for name, verdict in verdicts.items() if verdict.status == PASS} == passes - {
        *fails
    }


@EVERYTHING
def test_in_a_test_of_your_own(tmp_path):
    """The fixture: a script that starts its processes itself passes, and one fails."""
    (tmp_path / "crash.py").write_text("raise ValueError('no data')", encoding="utf-8")
    (tmp_path / "test_train.py").write_text(
        f"""def test_passes(ddp_check):
    verdicts = ddp_check({str(HERE / "styles" / "spawned.py")!r})
    assert verdicts["in each epoch, the ranks share out the data"] == "pass"

def test_fails(ddp_check):
    ddp_check("crash.py", "--epochs", 2)
""",
        encoding="utf-8",
    )
    start = [sys.executable, "-m", "pytest", "-p", "check_plugin", "test_train.py"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    result = subprocess.run(
        start, capture_output=True, text=True, check=False, timeout=300, env=env, cwd=tmp_path
    )
    assert "1 failed, 1 passed" in result.stdout, result.stdout
    assert "the script ends: exit code 1: ValueError: no data" in result.stdout
    assert "Traceback" not in result.stdout


# ---------------------------------------------------------------- scripts that do not get far


def report(*words):
    start = [sys.executable, HERE / "check.py", *words]
    return subprocess.run(start, capture_output=True, text=True, check=False, timeout=300)


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
    assert result.stderr.splitlines()[-1].startswith("check.py: error: there is no ")
