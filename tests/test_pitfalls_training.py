"""Pitfalls in how the ranks train together: the broken script shows the symptom, ours does not."""

import re

import pytest
import torch
from conftest import (
    SMALL,
    accuracy,
    command,
    error_lines,
    finished,
    losses,
    on_screen,
    patched,
    run,
    same_bits,
    weights,
)
from test_pitfalls_data import PROBES, SHORT, THREE, seen

EVERYTHING = pytest.mark.everything


def differing(job):
    """Return the names of the weights and buffers that differ between the ranks."""
    one, other = (rank["weights"] for rank in seen(job))
    return {name for name in one if not torch.equal(one[name], other[name])}


# ---------------------------------------------------------------- what is printed


@EVERYTHING
def test_rank_0_loss(both):
    """The weights are the same bits; the printed loss is that of rank 0's samples."""
    broken, ours = both("rank_0_loss", *PROBES, args=THREE)
    assert same_bits(broken, ours)
    assert all(one != other for one, other in zip(losses(broken), losses(ours), strict=True))
    whole = torch.tensor(seen(ours)[0]["totals"])
    parts = [torch.tensor(rank["totals"]) for rank in seen(broken)]
    assert whole.allclose(sum(parts))
    printed = [f"{loss / samples:.4f}" for loss, samples in seen(broken)[0]["totals"]]
    assert losses(broken) == printed


# ---------------------------------------------------------------- ranks that drift apart


def test_forward_through_module(both):
    broken, ours = both("forward_through_module", *PROBES, args=THREE)
    assert not differing(ours)
    assert differing(broken) == weights(broken).keys()
    counts = [rank["reduced"] for job in (broken, ours) for rank in seen(job)]
    assert counts == [0, 0, 306, 306]  # 3 epochs of 102 batches


@EVERYTHING
def test_edit_on_one_rank(both):
    broken, ours = both("edit_on_one_rank", *PROBES, args=THREE)
    assert not differing(ours)
    assert differing(broken) == {"8.bias"}


@EVERYTHING
def test_optimizer_of_other_parameters(both):
    unchanged = []
    for job in both("optimizer_of_other_parameters", *PROBES, args=THREE):
        first, last = seen(job)[0]["first_weights"], weights(job)
        unchanged.append({name for name in first if torch.equal(first[name], last[name])})
    assert unchanged == [{"8.weight", "8.bias"}, set()]


# ---------------------------------------------------------------- the size of a step


@EVERYTHING
def test_learning_rate_for_a_larger_batch(both):
    broken, ours = both("learning_rate_for_a_larger_batch", args=("2", "--width=8"))
    assert accuracy(broken)[0] < 85
    assert accuracy(ours)[0] > 93


@EVERYTHING
def test_accumulation_without_no_sync(both):
    """306 batches: the broken script takes a step after every fourth of an epoch's 102."""
    broken, ours = both("accumulation_without_no_sync", *PROBES, args=THREE)
    for job, steps in ((broken, 3 * 25), (ours, 306)):
        for rank in seen(job):
            assert rank["reduced"] == 306
            assert len(rank["steps"]) == steps


@EVERYTHING
def test_accumulation_undivided(tmp_path):
    """Four times the gradient in each step, and yet AdamW makes nearly the same steps."""
    remedy = ("        loss.backward()", "        (loss / 4).backward()")
    norms = []
    for name, changes in ("broken", ()), ("remedied", (remedy,)):
        (tmp_path / name).mkdir()
        path = patched(tmp_path / name, "pitfalls/accumulation_undivided", *PROBES, *changes)
        first, _ = seen(finished(command(path, "1", *SMALL), tmp_path / name))
        norms.append(torch.tensor([norm for _, norm in first["steps"]]))
    broken, remedied = norms
    assert len(broken) == 25
    assert broken[0] == 4 * remedied[0]
    assert broken.allclose(4 * remedied, rtol=0.05)


# ---------------------------------------------------------------- parameters without gradients


@EVERYTHING
def test_unused_parameters(tmp_path):
    """With the option that the error names, it trains."""
    path = patched(tmp_path, "pitfalls/unused_parameters")
    job = run(command(path, "1", *SMALL), tmp_path)
    assert job.returncode == 1
    first, note = on_screen("pitfalls/unused_parameters")[0], "find_unused_parameters=True"
    [error] = error_lines(job)
    assert error.startswith(first)
    assert note in error
    assert "Parameter indices which did not receive grad" in job.stderr
    searching = patched(
        tmp_path, "pitfalls/unused_parameters", ("DDP(model)", f"DDP(model, {note})")
    )
    job = finished(command(searching, "1", *SMALL), tmp_path)
    assert all(text not in job.stderr for text in on_screen("pitfalls/find_unused_without_need"))


@EVERYTHING
def test_find_unused_without_need(both):
    broken, ours = both("find_unused_without_need", *PROBES, args=THREE)
    assert same_bits(broken, ours)
    [text] = on_screen("pitfalls/find_unused_without_need")
    assert broken.stderr.count(text) == 2  # once on each rank
    assert text not in ours.stderr


# ---------------------------------------------------------------- modes and buffers


NORM = (
    "    first = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]\n",
    "    first = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]\n",
)


@EVERYTHING
def test_eval_never_undone(both, trained_with):
    broken, _ = both("eval_never_undone", *PROBES, args=THREE)
    ours = trained_with("05", (NORM, *PROBES), THREE)
    for job, right in ((broken, 1), (ours, 3)):
        modes = [training for training, _ in seen(job)[0]["steps"]]
        assert modes == [True] * 102 * right + [False] * 102 * (3 - right)
        assert weights(job)["1.num_batches_tracked"] == 102 * right


@EVERYTHING
def test_batchnorm_of_rank_0(both, trained_with):
    broken, _ = both("batchnorm_of_rank_0", *PROBES, args=THREE)
    ours = trained_with("05", (NORM, *PROBES), THREE)
    assert differing(broken) == {"1.running_mean", "1.running_var"}
    assert not differing(ours)


@EVERYTHING
def test_rank_0_evaluates_the_wrapper(tmp_path):
    """The same script ends well if it calls the module, or if the model has no buffers."""
    path = patched(tmp_path, "pitfalls/rank_0_evaluates_the_wrapper", SHORT)
    job = run(command(path, "1", *SMALL), tmp_path)
    assert job.returncode == 1
    assert "accuracy" not in job.stdout
    assert re.search(r"^\[rank0\]: .* in _sync_buffers$", job.stderr, re.MULTILINE)
    assert re.search(r"^\[rank1\]: .* in barrier$", job.stderr, re.MULTILINE)
    [text] = on_screen("pitfalls/rank_0_evaluates_the_wrapper")
    assert any(text in line for line in error_lines(job))
    for change in ("(trainer.model,", "(trainer.model.module,"), NORM[::-1]:
        (tmp_path / "checkpoint.pt").unlink()
        path = patched(tmp_path, "pitfalls/rank_0_evaluates_the_wrapper", SHORT, change)
        assert accuracy(finished(command(path, "1", *SMALL), tmp_path))[2] == 359
