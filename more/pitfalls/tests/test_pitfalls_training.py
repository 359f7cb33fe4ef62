"""Pitfalls in data, training and evaluation: what the broken script does."""

import re

import pytest
from changes import IMPATIENT, printed_at_the_end
from running import ONE, TWO
from support.results import losses, printed_by, same_bits
from support.scripts import digest, on_each_rank

pytestmark = pytest.mark.slow


@pytest.mark.gpu
def test_missing_barrier(pitfall):
    """Rank 1 finds no file, or that of the previous epoch, unless it waits for rank 0."""
    save, load = "        os.replace(", "        checkpoint = torch.load(args.checkpoint_path"
    late = (save, f"        time.sleep(3)\n{save}")
    patient = ("timedelta(minutes=5)", "timedelta(seconds=10)")  # longer than the writer is slow
    job = pitfall.ran(late, patient, code=1)
    assert re.search(r"^\[rank1\]: .*No such file", job.stderr, re.MULTILINE), job
    weights = printed_at_the_end(digest("model.parameters()"))
    for name, barrier in ("broken", ()), ("remedied", [(load, f"        dist.barrier()\n{load}")]):
        job = pitfall.at(name).ran(late, patient, weights, *barrier, args=TWO)
        assert (printed_by(job, 0) == printed_by(job, 1)) == bool(barrier)


def test_persistent_workers(pitfall):
    """The first batches of both epochs are equal."""
    line = "            total[0] += self._run_batch("
    say = on_each_rank(digest("[source]"))
    show = f"            if total[1] == 0:\n                {say}{line}"
    first, second = printed_by(pitfall.ran((line, show), args=(*TWO, "--num-workers=1")), 0)
    assert first == second


@pytest.mark.gpu
def test_rank_0_loss(pitfall, trained):
    """The weights are bit-for-bit identical to those of step 5, but the losses are not."""
    job, ours = pitfall.ran(), trained("05", *ONE)
    assert same_bits(job, ours)
    assert losses(job) != losses(ours)


def test_mean_of_means(pitfall):
    """The last batch of rank 0 has one sample, so the result is no share of 359 samples."""
    job = pitfall.ran(args=("1", "--width=4", "--batch-size=179"))
    shares = {f"accuracy {correct / 359:.2%}" for correct in range(360)}
    assert re.findall(r"accuracy [\d.]+%", job.stdout)[-1] not in shares


def test_prints_on_every_rank(pitfall):
    assert pitfall.ran().stdout.count("epoch 1 ") == 2


def test_rank_0_evaluates_the_wrapper(pitfall):
    job = pitfall.refused(IMPATIENT)
    assert re.search(r"^\[rank0\]: .* in _sync_buffers$", job.stderr, re.MULTILINE)
    assert re.search(r"^\[rank1\]: .* in barrier$", job.stderr, re.MULTILINE)
