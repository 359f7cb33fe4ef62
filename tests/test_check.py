"""check.py judges scripts: ours, those that the pitfalls break, and scripts of other styles."""

import os
import re
import subprocess
import sys

import check
import check_run
import patches
import pytest
from check_rules import FAIL, PASS, RULES, UNSEEN
from conftest import LONG, ROOT, SCRIPT, SMALL, edited, same_bits

EVERYTHING = pytest.mark.everything
PAGE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
TITLES = {rule.__name__: rule.__doc__ for rule in RULES}
FAILS = {  # pitfall: the rules that it fails
    "accumulation_undivided": ["gradients"],
    "accumulation_without_no_sync": ["gradients"],
    "batchnorm_of_rank_0": ["evaluation"],
    "collective_on_one_rank": ["it_ends", "evaluation", "collectives"],
    "destroy_missing": ["one_group"],
    "edit_on_one_rank": ["the_same_model"],
    "eval_never_undone": ["training_mode"],
    "every_rank_saves": ["it_ends", "files"],
    "find_unused_without_need": ["warnings"],
    "fixed_port": ["one_group"],
    "forward_through_module": ["the_same_model", "gradients"],
    "late_import": ["one_group"],
    "late_set_epoch": ["new_order"],
    "module_prefix_saved": ["keys"],
    "no_sampler": ["shards"],
    "no_set_epoch": ["new_order"],
    "optimizer_of_other_parameters": ["the_same_model"],
    "os_exit": ["one_group"],
    "padded_evaluation": ["evaluation"],
    "prints_on_every_rank": ["progress"],
    "rank_0_evaluates_the_wrapper": ["it_ends"],
    "rank_seeds_split_data": ["shards"],
    "same_augmentation": ["randomness"],
    "shuffle_beside_sampler": ["it_ends"],
    "split_differs_by_rank": ["shards"],
    "uneven_batches": ["it_ends", "shards"],
    "unused_parameters": ["it_ends"],
    "written_in_place": ["files"],
}
HANG = ("collective_on_one_rank", "rank_0_evaluates_the_wrapper")
DRILLED = {  # pitfall: the drill that fails
    "epoch_starts_again": "sigterm",
    "resume_without_optimizer": "kill",
    "sigterm_with_workers": "sigterm",
    "weights_only_false": "kill",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder of its own: the checker looks for a script's files in the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def judged(script, *arguments, **options):
    """Return the run of a script and its verdicts by the names of the rules."""
    run, verdicts = check.check(script, arguments, **options)
    return run, {rule.__name__: verdict for rule, (_, verdict) in zip(RULES, verdicts)}


def failed(verdicts):
    return [name for name, verdict in verdicts.items() if verdict.status == FAIL]


# ---------------------------------------------------------------- our scripts


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=EVERYTHING) for n in ("02", "03")), "05"])
def test_our_scripts_pass(step):
    run, verdicts = judged(SCRIPT[step], "2", *SMALL)
    assert failed(verdicts) == [], run.output
    unseen = {name for name, verdict in verdicts.items() if verdict.status != PASS}
    assert unseen == {"loads", "randomness", "beyond"}


@EVERYTHING
def test_observation_changes_no_bit(tmp_path_factory, trained):
    """Nor does it leave a file behind."""
    folder = tmp_path_factory.mktemp("plan")
    plan = check_run.Plan(SCRIPT["05"], LONG, 2, 300, folder)
    assert plan.run("here").returncode == 0
    assert same_bits(folder / "here" / "checkpoint.pt", trained("05", *LONG))
    assert os.listdir(folder / "here") == ["checkpoint.pt"]


@EVERYTHING
@pytest.mark.parametrize("name", ["kill", "sigterm", "world-size"])
def test_our_scripts_pass_the_drills(name):
    verdicts = check.drill(name, SCRIPT["05"], LONG)
    assert [verdict for _, verdict in verdicts if verdict.status != PASS] == []
    assert "you may rely on it" in check.conclude(name, verdicts)


@EVERYTHING
def test_without_a_handler_the_drill_does_not_apply():
    ((_, verdict),) = check.drill("sigterm", SCRIPT["03"], LONG)
    assert re.fullmatch(r"nothing handles SIGTERM: \d+ steps are lost", verdict.text)


# ---------------------------------------------------------------- pitfalls


def broken(tmp_path, name):
    patch = patches.read(ROOT, ROOT / "diffs" / "pitfalls" / f"{name}.diff")
    path = tmp_path / patch.new
    path.write_text(patch.result, encoding="utf-8")
    return path


@EVERYTHING
@pytest.mark.parametrize("name", FAILS)
def test_a_pitfall_fails_its_rule(tmp_path, name):
    timeout = 40 if name in HANG else 200
    run, verdicts = judged(broken(tmp_path, name), "3", *SMALL, timeout=timeout)
    assert failed(verdicts) == FAILS[name], run.output
    for verdict in verdicts.values():
        if verdict.pitfall:
            assert f'id="pitfall-{verdict.pitfall}"' in (
                ROOT / "diffs" / "pitfalls" / "README.md"
            ).read_text(encoding="utf-8")


@EVERYTHING
@pytest.mark.parametrize(("name", "drill"), DRILLED.items())
def test_a_pitfall_fails_its_drill(tmp_path, name, drill):
    verdicts = check.drill(drill, broken(tmp_path, name), LONG)
    assert FAIL in {verdict.status for _, verdict in verdicts}, verdicts
    assert "do not rely on it" in check.conclude(drill, verdicts)


def table():
    """Return the table of pitfalls and what the checker says, as Markdown."""
    lines = ["| pitfall | fails |", "|---|---|"]
    found = {name: "; ".join(TITLES[rule] for rule in rules) for name, rules in FAILS.items()}
    found |= {name: f"`--drill {drill}`" for name, drill in DRILLED.items()}
    for name, fails in sorted(found.items()):
        page = f"../diffs/pitfalls/README.md#pitfall-{name.replace('_', '-')}"
        lines.append(f"| [{name}]({page}) | {fails} |")
    every = {path.stem for path in (ROOT / "diffs" / "pitfalls").glob("*.diff")}
    unseen = ", ".join(f"{name}" for name in sorted(every - {*found}))
    return "\n".join([*lines, "", f"Not seen: {unseen}."])


def test_the_table_is_on_the_page():
    """To see it: `python -c "import test_check; print(test_check.table())"` in this folder."""
    assert table() in PAGE


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


def report(*words):
    start = [sys.executable, ROOT / "tests" / "check.py", *words]
    return subprocess.run(start, capture_output=True, text=True, check=False, timeout=200)


def test_a_script_that_crashes(tmp_path):
    """The report of the command: the error, and no false alarm about what was not reached."""
    path = tmp_path / "train.py"
    path.write_text("import torch\nraise ValueError('no data')\n", encoding="utf-8")
    result = report(path)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "FAIL            the script ends: exit code 1: ValueError: no data"
    assert lines[-1] == f"2 FAIL, {len(RULES) - 3} not seen, 1 pass"
    assert result.stderr == ""


@EVERYTHING
def test_a_script_that_never_returns(tmp_path):
    loop = ("    trainer.train(", "    while True:\n        time.sleep(1)\n    trainer.train(")
    run, verdicts = judged(edited(tmp_path, "04", loop), timeout=20)
    line = edited(tmp_path, "04", loop).read_text("utf-8").split("time.sleep(1)")[0].count("\n") + 1
    assert run.returncode is None
    for rank in (0, 1):
        assert f"rank {rank} is at 04_multinode.py:{line}, in main" in verdicts["it_ends"].text
    assert failed(verdicts) == ["it_ends"]


@EVERYTHING
def test_a_script_that_lacks_an_argument(tmp_path):
    _, verdicts = judged(SCRIPT["05"], "no-number")
    assert "argument total_epochs: invalid positive_int value" in verdicts["it_ends"].text
    assert failed(verdicts) == ["it_ends", "one_group"]
    assert verdicts["the_same_model"].status == UNSEEN


def test_no_script(tmp_path):
    result = report(tmp_path / "missing.py")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("check.py: error: there is no ")
