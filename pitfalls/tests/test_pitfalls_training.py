"""Pitfalls in data, training and evaluation: only the broken script shows the symptom."""

import re
from ast import literal_eval

import pytest
import torch
from patching import on_screen, patched
from running import IMPATIENT, ONE, said_at_the_end
from support.jobs import finished, run
from support.results import accuracy, error_lines, losses, said, same_bits
from support.scripts import SMALL, digest, forked, on_each_rank

pytestmark = pytest.mark.slow
SPLIT = "    padded = nn.functional.pad("
SUM = "        loss, samples = total.tolist()"
# Each rank prints how it split the data, and the sums of its losses and samples.
PROBES = (
    (SPLIT, f"    {on_each_rank('[*map(int, train)], [*map(int, test)]')}{SPLIT}"),
    (SUM, f"        {on_each_rank('total.tolist()')}{SUM}"),
)


def probed(job, rank):
    """Return what the probes printed on a rank."""
    return [literal_eval(text) for text in said(job, rank)]


def test_split_differs_by_rank(both):
    """About 359 * 1438 / 1797 = 287 samples leak, give or take 7."""
    leaks = []
    for job in both("split_differs_by_rank", *PROBES):
        ((train, _), _), ((_, held_out), _) = (probed(job, rank) for rank in (0, 1))
        leaks.append(len(set(train) & set(held_out)))
    assert 230 < leaks[0] < 340
    assert leaks[1] == 0


REPLACE = "        os.replace("
# The writer is slow, and half of the checkpoint stands under its name for a while.
LATE = (REPLACE, f"        time.sleep(3)\n{REPLACE}")
HALF = f"""\
        with open("half.pt", "wb") as half, open(f"{{self.path}}.new", "rb") as whole:
            half.write(whole.read(1000))
        os.replace("half.pt", self.path)
        time.sleep(3)
{REPLACE}"""
LOAD = "        checkpoint = torch.load(args.checkpoint_path, map_location=device"
WAIT = "        while not os.path.exists(args.checkpoint_path):\n            time.sleep(0.1)\n"


def test_missing_barrier(tmp_path):
    """Rank 1 finds no file, half of one, or that of the previous epoch."""
    patient = ("timedelta(minutes=5)", "timedelta(seconds=10)")  # longer than the writer is slow
    show = said_at_the_end(digest("model.parameters()"))

    def job_with(*changes, epochs):
        (tmp_path / "checkpoint.pt").unlink(missing_ok=True)
        path = patched(tmp_path, "pitfalls/missing_barrier", patient, show, *changes)
        return run(forked(path, epochs, *SMALL), tmp_path)

    found_too_early = [LATE], [(REPLACE, HALF), (LOAD, WAIT + LOAD)]
    for text, changes in zip(on_screen("pitfalls/missing_barrier"), found_too_early, strict=True):
        job = job_with(*changes, epochs="1")
        assert job.returncode == 1
        assert re.search(rf"^\[rank1\]: .*{text}", job.stderr, re.MULTILINE), job
        assert not re.search(rf"^\[rank0\]: .*{text}", job.stderr, re.MULTILINE), job
    for changes in (), [(LOAD, f"        dist.barrier()\n{LOAD}")]:
        job = job_with(LATE, *changes, epochs="2")
        assert job.returncode == 0, job
        assert (said(job, 0) == said(job, 1)) == bool(changes)


def test_persistent_workers(tmp_path):
    """Print the first batch of both epochs; without persistent workers, they differ."""
    start = "            total[0] += self._run_batch("
    show = (
        start,
        f"            if step == 0:\n                {on_each_rank(digest('[source]'))}{start}",
    )
    for persistent in True, False:
        change = ("persistent_workers=True", f"persistent_workers={persistent}")
        path = patched(tmp_path, "pitfalls/persistent_workers", change, show)
        first, second = said(finished(forked(path, "2", *SMALL), tmp_path), 0)
        assert (first == second) == persistent
        (tmp_path / "checkpoint.pt").unlink()


def test_rank_0_loss(both):
    """The weights are bit-for-bit identical; the printed loss is that of rank 0's samples."""
    broken, ours = both("rank_0_loss", *PROBES)
    assert same_bits(broken, ours)
    parts = [torch.tensor(probed(broken, rank)[1]) for rank in (0, 1)]
    whole = torch.tensor(probed(ours, 0)[1])
    assert whole.allclose(sum(parts))
    for job, (loss, samples) in (broken, parts[0]), (ours, whole):
        assert losses(job) == [f"{loss / samples:.4f}"]
    assert losses(broken) != losses(ours)


def test_learning_rate_for_a_larger_batch(both):
    broken, ours = both("learning_rate_for_a_larger_batch", args=("2", "--width=8"))
    assert accuracy(broken)[0] < 85
    assert accuracy(ours)[0] > 93


def test_accumulation_undivided(tmp_path):
    """The gradient is four times as large, yet AdamW takes nearly the same steps."""
    made = "    trainer = Trainer("
    norm = "nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()"
    hook = f"    optimizer.register_step_pre_hook(lambda *_: {on_each_rank(norm).strip()})\n"
    remedy = ("        loss.backward()", "        (loss / 4).backward()")
    norms = []
    for changes in [], [remedy]:
        hooked = (made, hook + made)
        script = patched(tmp_path, "pitfalls/accumulation_undivided", hooked, *changes)
        job = finished(forked(script, *ONE), tmp_path)
        norms.append(torch.tensor([float(text) for text in said(job, 0)]))
        (tmp_path / "checkpoint.pt").unlink()
    broken, remedied = norms
    assert len(broken) == 25
    assert broken[0] == 4 * remedied[0]
    assert broken.allclose(4 * remedied, rtol=0.05)


def test_find_unused_without_need(both):
    broken, ours = both("find_unused_without_need")
    assert same_bits(broken, ours)
    [text] = on_screen("pitfalls/find_unused_without_need")
    assert broken.stderr.count(text) == 2  # once on each rank
    assert text not in ours.stderr


def test_mean_of_means(trained_with, tmp_path):
    """The report knows how many digits were read: the recall of each digit, times its samples."""

    def from_the_report(job):
        rows = re.findall(r"^ +\d +[\d.]+ +([\d.]+) +[\d.]+ +(\d+)$", job.stdout, re.MULTILINE)
        assert len(rows) == 10
        correct = sum(round(float(recall) * int(samples)) for recall, samples in rows)
        return f"accuracy {correct / 359:.2%}"

    path = patched(tmp_path, "pitfalls/mean_of_means")
    broken = finished(forked(path, "1", "--batch-size=179", "--width=4"), tmp_path)
    ours = trained_with("05", PROBES, ONE)
    assert from_the_report(ours) == ours.stdout.splitlines()[-1].split(" (")[0]
    assert from_the_report(broken) != broken.stdout.splitlines()[-1]


def test_rank_0_evaluates_the_wrapper(tmp_path):
    path = patched(tmp_path, "pitfalls/rank_0_evaluates_the_wrapper", IMPATIENT)
    job = run(forked(path, *ONE), tmp_path)
    assert job.returncode == 1
    assert "accuracy" not in job.stdout
    assert re.search(r"^\[rank0\]: .* in _sync_buffers$", job.stderr, re.MULTILINE)
    assert re.search(r"^\[rank1\]: .* in barrier$", job.stderr, re.MULTILINE)
    [text] = on_screen("pitfalls/rank_0_evaluates_the_wrapper")
    assert any(text in line for line in error_lines(job))
