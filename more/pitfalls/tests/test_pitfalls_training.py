"""Pitfalls in data, training and evaluation: only the broken script shows the symptom."""

import re
from ast import literal_eval

import pytest
from changes import IMPATIENT, said_at_the_end
from support.results import losses, said, same_bits
from support.scripts import SMALL, digest, on_each_rank

pytestmark = pytest.mark.slow


def test_split_differs_by_rank(both):
    """About 359 * 1438 / 1797 = 287 samples leak, give or take 7."""
    line = "    padded = nn.functional.pad("
    split = (line, f"    {on_each_rank('[*map(int, train)], [*map(int, test)]')}{line}")
    leaks = []
    for job in both(split):
        (train, _), (_, held_out) = (literal_eval(said(job, rank)[0]) for rank in (0, 1))
        leaks.append(len(set(train) & set(held_out)))
    assert 230 < leaks[0] < 340
    assert leaks[1] == 0


REPLACE = "        os.replace("
# The writer is slow, and half of the checkpoint stands under its name for a while.
LATE = (REPLACE, f"        time.sleep(3)\n{REPLACE}")
HALF = f"""\
        os.system("head -c 1000 checkpoint.pt.new > half.pt; mv half.pt checkpoint.pt")
{LATE[1]}"""
LOAD = "        checkpoint = torch.load(args.checkpoint_path, map_location=device"
WAIT = "        while not os.path.exists(args.checkpoint_path):\n            time.sleep(0.1)\n"


@pytest.mark.gpu
def test_missing_barrier(pitfall):
    """Rank 1 finds no file, half of one, or that of the previous epoch."""
    patient = ("timedelta(minutes=5)", "timedelta(seconds=10)")  # longer than the writer is slow
    found_too_early = [LATE], [(REPLACE, HALF), (LOAD, WAIT + LOAD)]
    for text, changes in zip(pitfall.on_screen(), found_too_early, strict=True):
        job = pitfall.ran(patient, *changes, code=1)
        assert re.search(rf"^\[rank1\]: .*{text}", job.stderr, re.MULTILINE), job
        assert not re.search(rf"^\[rank0\]: .*{text}", job.stderr, re.MULTILINE), job
        (job.cwd / "checkpoint.pt").unlink()
    weights = said_at_the_end(digest("model.parameters()"))
    for name, barrier in ("broken", ()), ("remedied", [(LOAD, f"        dist.barrier()\n{LOAD}")]):
        job = pitfall.at(name).ran(patient, weights, LATE, *barrier, args=("2", *SMALL))
        assert (said(job, 0) == said(job, 1)) == bool(barrier)


def test_persistent_workers(pitfall):
    """Print the first batch of both epochs; without persistent workers, they differ."""
    line = "            total[0] += self._run_batch("
    say = on_each_rank(digest("[source]"))
    show = f"            if total[1] == 0:\n                {say}{line}"
    for persistent in True, False:
        change = ("persistent_workers=True", f"persistent_workers={persistent}")
        workers = ("2", "--num-workers=1", *SMALL)
        job = pitfall.at(f"{persistent}").ran(change, (line, show), args=workers)
        first, second = said(job, 0)
        assert (first == second) == persistent


@pytest.mark.gpu
def test_rank_0_loss(both):
    """The weights are bit-for-bit identical, the printed losses are not."""
    broken, ours = both()
    assert same_bits(broken, ours)
    assert losses(broken) != losses(ours)


def test_accumulation_without_no_sync(pitfall):
    """The gradient is four times as large, yet AdamW takes nearly the same steps."""
    made = "    trainer = Trainer("
    norm = "nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()"
    hook = f"    optimizer.register_step_pre_hook(lambda *_: {on_each_rank(norm).strip()})\n"
    divided = ("        loss.backward()", "        (loss / 4).backward()")
    broken, remedied = (
        [float(text) for text in said(pitfall.at(name).ran((made, hook + made), *changes), 0)]
        for name, changes in (("broken", []), ("remedied", [divided]))
    )
    assert len(broken) == 25
    assert broken[0] == 4 * remedied[0]
    assert broken == pytest.approx([4 * norm for norm in remedied], rel=0.05)


def test_mean_of_means(both):
    """The last batch of rank 0 has one sample, so the result is no share of 359 samples."""
    broken, ours = both(args=("1", "--width=4", "--batch-size=179"))
    shares = {f"accuracy {correct / 359:.2%}" for correct in range(360)}
    found = [re.findall(r"accuracy [\d.]+%", job.stdout)[-1] in shares for job in (broken, ours)]
    assert found == [False, True]


def test_prints_on_every_rank(both):
    assert [job.stdout.count("epoch 1 ") for job in both()] == [2, 1]


def test_rank_0_evaluates_the_wrapper(pitfall):
    job = pitfall.refused(IMPATIENT)
    assert "accuracy" not in job.stdout
    assert re.search(r"^\[rank0\]: .* in _sync_buffers$", job.stderr, re.MULTILINE)
    assert re.search(r"^\[rank1\]: .* in barrier$", job.stderr, re.MULTILINE)
