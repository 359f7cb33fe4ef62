"""What holds across the ladder: one story, the same bits, the same manners."""

import ast
import difflib
import sys
from itertools import combinations, pairwise

import pytest
import torch
from conftest import (
    LONG,
    SCRIPT,
    SMALL,
    arguments,
    command,
    epochs,
    finished,
    load,
    run,
    same_bits,
)

DISTRIBUTED = ["02", "03", "04", "05"]


# ---------------------------------------------------------------- the same bits everywhere


EVERYTHING = pytest.mark.everything


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=EVERYTHING)])
@pytest.mark.parametrize("step", ["03", "04", "05"])
def test_the_same_bits_on_every_step(trained, step, nprocs):
    """Step 04 on two nodes, and with another rendezvous, is compared in its own tests."""
    assert same_bits(trained(step, *LONG, nprocs=nprocs), trained("02", *LONG, nprocs=nprocs))


@EVERYTHING
@pytest.mark.parametrize("nprocs", [1, 3, 5, 8, 16])
def test_the_same_bits_at_other_world_sizes(trained, nprocs):
    first, *rest = [trained(step, "1", *SMALL, nprocs=nprocs) for step in DISTRIBUTED]
    assert all(same_bits(first, other) for other in rest)


@pytest.mark.parametrize("step", DISTRIBUTED)
def test_only_rank_0_prints_and_writes(trained, step):
    job = trained(step, *LONG)
    assert epochs(job) == sorted(set(epochs(job)))
    assert job.stdout.count("accuracy ") == 1 + (step == "05")  # and once in the class report
    assert [path.name for path in job.cwd.glob("[!.]*")] == ["checkpoint.pt"]


@pytest.mark.parametrize("step", DISTRIBUTED)
def test_rank_1_saves_nothing(step, tmp_path, process_group, monkeypatch):
    module = load(step)
    args = arguments(tmp_path / "checkpoint.pt")
    train_set, _, model, optimizer = module.load_train_objs(args)
    data = module.prepare_dataloader(train_set, args)
    monkeypatch.setattr(module.Trainer, "_run_epoch", lambda *_: None)
    for rank in (1, 0):
        module.Trainer(model, data, optimizer, torch.device("cpu"), rank, args).train()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"] * (rank == 0)


# ---------------------------------------------------------------- bad input


BAD_ARGUMENTS = [
    (["0"], "total_epochs must be positive, not 0"),
    (["-3"], "total_epochs must be positive, not -3"),
    (["four"], "argument total_epochs: invalid int value: 'four'"),
    (["1", "0"], "save_every must be positive, not 0"),
    (["--batch-size=0"], "batch_size must be positive, not 0"),
    (["--lr=0"], "lr must be positive, not 0.0"),
    (["--lr=nan"], "lr must be positive, not nan"),
    (["--lr=inf"], "lr must be positive, not inf"),
    (["--width=-1"], "width must be positive, not -1"),
    (["--seed=x"], "argument --seed: invalid int value: 'x'"),
    (["1", "2", "3"], "unrecognized arguments: 3"),
    (["--checkpoint-path=no/such/folder.pt"], "no/such/folder.pt"),
]


@pytest.mark.parametrize("step", SCRIPT)
def test_bad_arguments_get_one_line_and_exit_code_2(step, tmp_path, monkeypatch, capsys):
    module = load(step)
    monkeypatch.chdir(tmp_path)
    for words, line in BAD_ARGUMENTS:
        monkeypatch.setattr(sys, "argv", [SCRIPT[step].name, *words])
        with pytest.raises(SystemExit) as stop:
            module.parse_args()
        assert stop.value.code == 2, words
        (error,) = capsys.readouterr().err.splitlines()
        assert line in error, words


@pytest.mark.parametrize(
    "step", ["02", "03", *(pytest.param(n, marks=EVERYTHING) for n in ("04", "05"))]
)
def test_bad_arguments_for_real(tmp_path, step):
    job = run(command(step, "0", nprocs=1), tmp_path)
    assert job.returncode == (2 if step == "02" else 1)
    assert f"{SCRIPT[step].name}: error: total_epochs must be positive, not 0" in job.stderr
    assert not list(tmp_path.glob("[!.]*"))


@pytest.mark.parametrize("step", SCRIPT)
def test_help_is_worth_reading(step):
    text = load(step).parser.format_help()
    for word in ("total_epochs", "save_every", "--batch-size", "--lr", "--width", "--seed"):
        assert word in text
    assert "(default: 32)" in text
    assert f"Step {int(step)}: " in text


# ---------------------------------------------------------------- one story, five times


def test_the_same_functions_in_the_same_order():
    names = {}
    for step, path in SCRIPT.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        names[step] = [n.name for n in sorted(functions, key=lambda node: node.lineno)]
    for old, new in pairwise(DISTRIBUTED):
        assert [name for name in names[new] if name in names[old]] == names[old]


def functions(step):
    """Return the text of each function and method of a step, by name."""
    text = SCRIPT[step].read_text(encoding="utf-8")
    tree = ast.walk(ast.parse(text))
    return {n.name: ast.get_source_segment(text, n) for n in tree if isinstance(n, ast.FunctionDef)}


def test_step_5_changes_nothing_but_evaluation():
    """So that what is tested of step 4 holds for step 5."""
    old, new = functions("04"), functions("05")
    changed = {name for name in new if new[name] != old.get(name)}
    assert changed == {"_run_epoch", "evaluate", "report", "main"}
    everybody = old["main"].replace("    if rank == 0:\n        evaluate(", "    evaluate(")
    assert new["main"] == everybody


@pytest.mark.parametrize("step", DISTRIBUTED)
def test_seed_and_epoch_decide_on_the_order(step, tmp_path, process_group):
    module, orders = load(step), []
    for seed in (0, 10):  # the sampler adds seed and epoch
        args = arguments(tmp_path / "none.pt", seed=seed, batch_size=12_942)
        train_set, _, model, optimizer = module.load_train_objs(args)
        data = module.prepare_dataloader(train_set, args)
        trainer = module.Trainer(model, data, optimizer, torch.device("cpu"), 0, args)
        orders.append(model[0].weight.flatten().tolist())
        for epoch in (1, 2):
            trainer._run_epoch(epoch)
            data.sampler.samples_run = trainer.samples_run = 0
            orders.append(list(data.sampler))
    assert all(a != b for a, b in combinations(orders, 2))


def changed_lines(old, new):
    texts = (SCRIPT[step].read_text(encoding="utf-8").splitlines() for step in (old, new))
    diff = list(difflib.unified_diff(*texts, n=0))[2:]
    return sum(line[0] in "+-" for line in diff)


def test_sizes_stay_within_the_budget(capsys):
    sizes = {f"{a} to {b}": changed_lines(a, b) for a, b in pairwise(SCRIPT)}
    with capsys.disabled():
        print("\nchanged lines:", ", ".join(f"{name} {size}" for name, size in sizes.items()))
    assert len(SCRIPT["01"].read_text(encoding="utf-8").splitlines()) <= 130
    assert max(sizes.values()) <= 70


# ---------------------------------------------------------------- and again and again


@EVERYTHING
@pytest.mark.parametrize("step", DISTRIBUTED)
def test_a_healthy_run_ends_well_10_times(tmp_path, step):
    """Without the barrier and the last line, some abort on their way out."""
    for attempt in range(10):
        path = f"--checkpoint-path={attempt}.pt"
        finished(command(step, "1", "--batch-size=6471", "--width=1", path), tmp_path)
