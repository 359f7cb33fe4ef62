"""What holds across the steps: identical weights, the same arguments, small diffs."""

import ast
import difflib
import shutil
import sys
from itertools import combinations, pairwise, product

import pytest
import torch
from support.jobs import finished, run
from support.results import epochs, error_lines, losses, resumed, same_bits
from support.scripts import (
    LONG,
    SCRIPT,
    SMALL,
    arguments,
    build_trainer,
    command,
    edited,
    exact,
    forked,
    load,
    without_spawn,
)

SLOW = pytest.mark.slow
DISTRIBUTED = ["02", "03", "04", "05"]


# ---------------------------------------------------------------- identical weights


@pytest.mark.parametrize(
    ("step", "nprocs"), [("03", 2), ("04", 2), ("05", 2), pytest.param("05", 4, marks=SLOW)]
)
def test_the_same_bits_on_every_step(launched, trained, step, nprocs):
    """Forked ranks, with which many tests compare, give the same weights as the launchers."""
    job, others = launched(step, *LONG, nprocs=nprocs), [trained("03", *LONG, nprocs=nprocs)]
    if nprocs == 2:
        others.append(launched("02", *LONG))
    for other in others:
        assert same_bits(job, other)
        assert losses(job) == losses(other)


@SLOW
def test_each_step_continues_the_checkpoint_of_the_one_before(trained_with, tmp_path):
    """One epoch on each, and the end is bit-for-bit that of an undisturbed run of step 3."""
    for number, step in enumerate(DISTRIBUTED):
        if step == "02":
            script = without_spawn(tmp_path, *exact(3))
        else:
            script = edited(tmp_path, step, *exact(3))
        job = finished(forked(script, str(number + 1), *SMALL, nprocs=3), tmp_path)
        assert resumed(job) == ([number] if number else [])
        assert epochs(job) == [number + 1]
    assert same_bits(job, trained_with("03", exact(3), LONG, nprocs=3))


@SLOW
def test_step_2_continues_the_checkpoint_of_step_1(trained, tmp_path):
    shutil.copy(trained("01", *LONG).cwd / "checkpoint.pt", tmp_path)
    job = finished(forked(without_spawn(tmp_path), "5", *SMALL), tmp_path)
    assert resumed(job) == [4]
    assert epochs(job) == [5]
    assert float(losses(job)[0]) < float(losses(trained("01", *LONG))[-1]) + 0.05
    states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["OPTIMIZER_STATE"]["state"]
    assert {int(state["step"]) for state in states.values()} == {4 * 203 + 102}


@pytest.mark.parametrize(
    "step", [*(pytest.param(n, marks=SLOW) for n in DISTRIBUTED[:-1]), DISTRIBUTED[-1]]
)
def test_only_rank_0_prints_and_writes(launched, step):
    job = launched(step, *LONG)
    assert epochs(job) == [1, 2, 3, 4]
    assert job.stdout.count("accuracy ") == 1 + (step == "05")  # the class report has one too
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


@pytest.mark.parametrize("step", DISTRIBUTED)
def test_rank_1_saves_nothing(step, tmp_path, process_group, monkeypatch):
    module = load(step)
    trainer = build_trainer(module, arguments(tmp_path / "checkpoint.pt"))
    for rank in (1, 0):
        monkeypatch.setattr(module.dist, "get_rank", lambda rank=rank: rank)
        trainer._save_checkpoint()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"] * (rank == 0)


# ---------------------------------------------------------------- arguments


BAD_ARGUMENTS = [
    (["0"], "argument total_epochs: invalid positive_int value: '0'"),
    (["-3"], "argument total_epochs: invalid positive_int value: '-3'"),
    (["four"], "argument total_epochs: invalid positive_int value: 'four'"),
    (["1", "0"], "argument save_every: invalid positive_int value: '0'"),
    (["--batch-size=0"], "argument --batch-size: invalid positive_int value: '0'"),
    (["--lr=x"], "argument --lr: invalid float value: 'x'"),
    (["--width=-1"], "argument --width: invalid positive_int value: '-1'"),
    (["--seed=x"], "argument --seed: invalid int value: 'x'"),
    (["1", "2", "3"], "unrecognized arguments: 3"),
    (["--checkpoint-path=no/such/folder.pt"], "cannot write to the folder of no/such/folder.pt"),
]


@pytest.mark.parametrize("step", SCRIPT)
def test_a_bad_argument_is_named_and_the_exit_code_is_2(step, tmp_path, monkeypatch, capsys):
    module = load(step)
    monkeypatch.chdir(tmp_path)
    for words, message in BAD_ARGUMENTS:
        monkeypatch.setattr(sys, "argv", [SCRIPT[step].name, *words])
        with pytest.raises(SystemExit) as stop:
            module.parse_args()
        assert stop.value.code == 2, words
        usage, error = capsys.readouterr().err.split(f"{SCRIPT[step].name}: error: ")
        assert usage.startswith("usage: ")
        assert error == f"{message}\n"


@pytest.mark.parametrize("step", ["02", pytest.param("03", marks=SLOW)])
def test_bad_arguments_for_real(tmp_path, step):
    job = run(command(step, "0", nprocs=1), tmp_path)
    assert job.returncode == (2 if step == "02" else 1)
    assert any("error: argument total_epochs" in line for line in error_lines(job))
    assert not list(tmp_path.glob("[!.]*"))


@pytest.mark.parametrize("step", SCRIPT)
def test_help(step, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT[step].name, "--help"])
    with pytest.raises(SystemExit):
        load(step).parse_args()
    text = capsys.readouterr().out
    for word in ("total_epochs", "save_every", "--batch-size", "--lr", "--width", "--seed"):
        assert word in text
    assert f"Step {int(step)}: " in text


# ---------------------------------------------------------------- one lesson a step


def test_the_same_functions_in_the_same_order():
    names = {}
    for step, path in SCRIPT.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        names[step] = [n.name for n in sorted(functions, key=lambda node: node.lineno)]
    for old, new in pairwise(SCRIPT):
        assert [name for name in names[new] if name in names[old]] == names[old]


def functions(step):
    """Return the text of each function and method of a step, by name."""
    text = SCRIPT[step].read_text(encoding="utf-8")
    tree = ast.walk(ast.parse(text))
    return {n.name: ast.get_source_segment(text, n) for n in tree if isinstance(n, ast.FunctionDef)}


def changed_functions(old, new):
    old, new = functions(old), functions(new)
    return {name for name in new if new[name] != old.get(name)}


def test_a_step_changes_only_its_subject():
    """So a test of one step also covers the others that have the same function."""
    assert changed_functions("02", "03") == {"ddp_setup", "check_restarts", "parse_args", "main"}
    assert changed_functions("04", "05") == {"evaluate", "main"}
    alone = "    if dist.get_rank() == 0 and not trainer.interrupted:\n"
    all_ranks = "    if not trainer.interrupted:\n"
    assert functions("05")["main"] == functions("04")["main"].replace(alone, all_ranks)
    for old, new in pairwise(SCRIPT):
        same = {"load_datasets", "build_model", "_run_batch", "positive_int"}
        assert not same & changed_functions(old, new)


@pytest.mark.parametrize("step", DISTRIBUTED)
def test_seed_and_epoch_decide_on_the_order(step, tmp_path, process_group):
    module, orders = load(step), []
    for seed in (0, 10):  # the sampler adds seed and epoch
        args = arguments(tmp_path / "none.pt", seed=seed, batch_size=12_942)
        trainer = build_trainer(module, args)
        for trainer.epochs_run in (0, 1):
            trainer._run_epoch()
            trainer.train_loader.sampler.samples_run = trainer.samples_run = 0
            orders.append(list(trainer.train_loader.sampler))
    assert all(a != b for a, b in combinations(orders, 2))


@pytest.mark.parametrize("step", DISTRIBUTED)
def test_each_rank_has_its_own_dropout(step, tmp_path, process_group, monkeypatch):
    """And each epoch: no two of them draw the same random numbers."""
    module, drawn = load(step), []
    trainer = build_trainer(module, arguments(tmp_path / "none.pt", batch_size=12_942))
    for rank, trainer.epochs_run in product((0, 1), (0, 1, 2)):
        monkeypatch.setattr(module.dist, "get_rank", lambda rank=rank: rank)
        trainer._run_epoch()
        trainer.train_loader.sampler.samples_run = trainer.samples_run = 0
        drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 6


@pytest.mark.parametrize("step", SCRIPT)
def test_an_epoch_trains_in_train_mode(step, tmp_path, process_group, monkeypatch):
    """Dropout and BatchNorm stay active, even if the model is evaluated after each epoch."""
    module, modes = load(step), []
    args = arguments(tmp_path / "none.pt", batch_size=12_942)
    trainer = build_trainer(module, args)
    run_batch = trainer._run_batch
    trainer._run_batch = lambda *batch: modes.append(trainer.model.training) or run_batch(*batch)
    for _ in range(2):
        trainer._run_epoch()
        trainer.samples_run = 0
        module.evaluate(trainer.model, module.load_datasets()[1], trainer.device, args)
        assert not trainer.model.training
    assert modes == [True, True]


def changed_lines(old, new):
    texts = (SCRIPT[step].read_text(encoding="utf-8").splitlines() for step in (old, new))
    diff = list(difflib.unified_diff(*texts, n=0))[2:]
    return sum(line[0] in "+-" for line in diff)


def test_sizes_stay_within_the_budget(capsys):
    sizes = [changed_lines(old, new) for old, new in pairwise(SCRIPT)]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in SCRIPT.values()]
    with capsys.disabled():
        print(f"\nlines: {lines}, changed: {sizes}")
    assert lines[0] <= 150
    assert lines[-1] <= 240 + 5  # five for clearer names and functions of their own
    limits = (50, 30 + 5, 60, 35)
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
