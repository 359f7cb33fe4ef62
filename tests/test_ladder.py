"""What holds across the steps: the same bits, the same arguments, one lesson a diff."""

import ast
import difflib
import re
import sys
from functools import cache
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from support.jobs import finished
from support.results import epochs, losses, printed_by, resumed, same_bits, weights
from support.scripts import FOUR_EPOCHS, NARROW, ROOT, SCRIPT, forked, load, on_each_rank

SLOW = pytest.mark.slow
# Step 3 runs an epoch as step 2 does, and step 5 as step 4: test_a_step_changes_only_its_subject.
RUN_EPOCHS = ["02", "04"]
PAIRS = [*pairwise(SCRIPT)]


# ---------------------------------------------------------------- identical weights


def test_spawn_and_torchrun_end_with_the_same_bits(spawned, two_nodes):
    """Step 2 with mp.spawn, and step 4 with a torchrun on each of two nodes."""
    node, _ = two_nodes(1)
    assert same_bits(spawned(), node.cwd.parent / "checkpoint.pt")


@pytest.mark.parametrize("step", ["03", "04", "05"])
def test_forked_ranks_with_which_other_tests_compare_end_with_the_same_bits(spawned, trained, step):
    assert same_bits(spawned(), trained(step, *FOUR_EPOCHS))
    assert losses(spawned()) == losses(trained(step, *FOUR_EPOCHS))


@SLOW
def test_each_step_continues_the_checkpoint_of_the_one_before(trained, tmp_path):
    """One epoch on each, and the end is bit-for-bit that of an undisturbed run of step 3."""
    for number, step in enumerate(["02", "03", "04", "05"]):
        job = finished(forked(step, str(number + 1), *NARROW), tmp_path)
        assert resumed(job) == ([number] if number else [])
        assert epochs(job) == [number + 1]
    assert same_bits(job, trained("03", *FOUR_EPOCHS))


# ---------------------------------------------------------------- bad input

TOO_SMALL = "total_epochs, save_every, --batch-size and --width must be at least 1"
BAD_ARGUMENTS = [
    (["0"], TOO_SMALL),
    (["1", "-3"], TOO_SMALL),
    (["--batch-size=0"], TOO_SMALL),
    (["--width=-1"], TOO_SMALL),
    (["four"], "argument total_epochs: invalid int value: 'four'"),
    (["--lr=x"], "argument --lr: invalid float value: 'x'"),
    (["--num-workers=-1"], "--num-workers must be at least 0"),
    (["--seed=x"], "argument --seed: invalid int value: 'x'"),
    (["1", "2", "3"], "unrecognized arguments: 3"),
    (["--checkpoint-path=no/such/folder.pt"], "cannot write to the folder of no/such/folder.pt"),
]
BAD_NPROCS = [
    (["--nprocs=0"], "--nprocs must be at least 1"),
    (["--nprocs=x"], "argument --nprocs: invalid int value: 'x'"),
]


@pytest.mark.parametrize("step", SCRIPT)
def test_a_bad_argument_is_named_and_the_exit_code_is_2(step, tmp_path, monkeypatch, capsys):
    module = load(step)
    monkeypatch.chdir(tmp_path)
    for words, message in BAD_ARGUMENTS + (BAD_NPROCS if step == "02" else []):
        monkeypatch.setattr(sys, "argv", [SCRIPT[step].name, *words])
        with pytest.raises(SystemExit) as stop:
            module.parse_args()
        assert stop.value.code == 2, words
        usage, error = capsys.readouterr().err.split(f"{SCRIPT[step].name}: error: ")
        assert usage.startswith("usage: ")
        assert error == f"{message}\n"


@pytest.mark.parametrize("step", SCRIPT)
def test_help_names_the_same_arguments_in_all_steps(step, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT[step].name, "--help"])
    with pytest.raises(SystemExit):
        load(step).parse_args()
    text = capsys.readouterr().out
    options = {"--batch-size", "--lr", "--width", "--seed", "--num-workers", "--checkpoint-path"}
    options |= {"--help"} | ({"--nprocs"} if step == "02" else set())
    assert set(re.findall(r"^  .*(--[\w-]+)", text, re.MULTILINE)) == options
    assert "total_epochs" in text
    assert "save_every" in text
    assert f"Step {int(step)}: " in text


# ---------------------------------------------------------------- one lesson a step


@cache
def functions(step):
    """Return the text of each function and method of a step, by name."""
    text = SCRIPT[step].read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def test_a_step_changes_only_its_subject():
    """So a test of one step also covers the others that have the same function."""

    def changed(old, new):
        old, new = functions(old), functions(new)
        return {name for name in new if new[name] != old.get(name)}

    assert not {"_load_checkpoint", "train"} & changed("01", "02")
    assert changed("02", "03") == {"ddp_setup", "__init__", "parse_args", "main"}
    assert changed("04", "05") == {"evaluate", "train_and_evaluate"}  # so 5 stops and saves as 4
    for old, new in PAIRS:
        assert not {"load_datasets", "build_model", "_run_batch"} & changed(old, new)


def run_epoch(trainer, epoch):
    trainer.epochs_run = epoch
    trainer.samples_run = 0  # steps 4 and 5 would skip this many samples
    trainer._run_epoch()


@pytest.mark.parametrize("step", RUN_EPOCHS)
def test_seed_and_epoch_decide_on_the_order(step, build_trainer):
    orders = []
    for seed in (0, 10):  # the sampler adds seed and epoch
        trainer = build_trainer(step, f"--seed={seed}")
        for epoch in (0, 1):
            run_epoch(trainer, epoch)
            orders.append(list(trainer.train_loader.sampler))
    assert all(a != b for a, b in combinations(orders, 2))


@pytest.mark.parametrize("step", ["01", *RUN_EPOCHS])
def test_each_epoch_of_each_rank_draws_numbers_of_its_own(step, build_trainer, monkeypatch):
    trainer, drawn = build_trainer(step), []
    for rank in [0] if step == "01" else [0, 1]:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for epoch in (0, 1, 2):
            run_epoch(trainer, epoch)
            drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("step", SCRIPT)
def test_an_epoch_trains_in_train_mode(step, build_trainer):
    """Dropout and BatchNorm stay active, even if the model is evaluated after each epoch."""
    module, trainer, modes = load(step), build_trainer(step), []
    args = SimpleNamespace(batch_size=64)
    run_batch = trainer._run_batch
    trainer._run_batch = lambda *batch: modes.append(trainer.model.training) or run_batch(*batch)
    for epoch in (0, 1):
        run_epoch(trainer, epoch)
        module.evaluate(trainer.model, module.load_datasets()[1], trainer.device, args)
        assert not trainer.model.training
    assert len(modes) == 2 * 4  # batches
    assert all(modes)


@pytest.mark.parametrize("step", SCRIPT)
def test_num_workers_is_the_number_of_the_loaders_workers(step, build_trainer):
    assert build_trainer(step, "--num-workers=1").train_loader.num_workers == 1


# ---------------------------------------------------------------- one batch of each step


def says(word, line):
    """Return a change with which each rank prints the word before it runs the given line.

    The beginning of the line is enough.
    """
    return line, f"{line[: -len(line.lstrip())]}{on_each_rank(repr(word))}{line}"


@pytest.fixture
def one_batch(trained_with):
    """Return a function that runs a step for one batch, and returns the Job.

    The learning rate is 0, so the weights stay as they were drawn. From step 2 on, the ranks print
    "saves", "evaluates" and "leaves", and rank 0 waits for a second before it evaluates.
    """
    args = ("1", *NARROW, "--lr=0", "--seed=1", "--batch-size=12942")
    slow = "    time.sleep(1 - dist.get_rank())\n"
    line, evaluates = says("evaluates", '    log(f"accuracy')
    changes = (
        says("saves", "        with open("),
        (line, slow + evaluates),
        says("leaves", "    dist.destroy_process_group("),
    )
    return lambda step: trained_with(step, () if step == "01" else changes, args)


@pytest.mark.parametrize("step", SCRIPT)
def test_the_seed_decides_on_the_first_weights(one_batch, step):
    torch.manual_seed(1)
    first, saved = load(step).build_model(4).state_dict(), weights(one_batch(step))
    assert all(torch.equal(first[name], saved[name]) for name in first)


@pytest.mark.parametrize("step", [*SCRIPT][1:])
def test_only_rank_0_saves(one_batch, step):
    assert "saves" in printed_by(one_batch(step), 0)
    assert "saves" not in printed_by(one_batch(step), 1)


@pytest.mark.parametrize("step", [*SCRIPT][1:-1])
def test_only_rank_0_evaluates(one_batch, step):
    assert "evaluates" in printed_by(one_batch(step), 0)
    assert "evaluates" not in printed_by(one_batch(step), 1)


@pytest.mark.parametrize("step", [*SCRIPT][1:])
def test_no_rank_leaves_the_group_before_rank_0_has_evaluated(one_batch, step):
    text = one_batch(step).stdout
    assert text.index("rank 0: evaluates") < text.index("rank 1: leaves")


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_the_diff_to_the_step_before_is_fresh(old, new):
    """Otherwise, run `python diffs/generate.py`."""
    texts = (SCRIPT[step].read_text(encoding="utf-8").splitlines() for step in (old, new))
    diff = difflib.unified_diff(*texts, SCRIPT[old].name, SCRIPT[new].name, lineterm="")
    written = (ROOT / "diffs" / f"{old}_to_{new}.diff").read_text(encoding="utf-8")
    assert written.splitlines()[1:] == [*diff]
