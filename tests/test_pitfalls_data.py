"""Pitfalls in what the ranks are fed with: the broken script shows the symptom, ours does not."""

import re
from collections import Counter

import pytest
import torch
from conftest import SMALL, accuracy, command, error_lines, finished, on_screen, patched, run

EVERYTHING = pytest.mark.everything
THREE = ("3", *SMALL)
SHORT = ("timedelta(minutes=5)", "timedelta(seconds=10)")
MAKE = (
    "    trainer = Trainer(model, prepare_dataloader(train_set, args), optimizer, device, args)\n"
)
# Each rank writes down what it has seen, the same in the broken script and in the step that it
# breaks, so that the step needs to run only once.
PROBES = (
    (
        "def load_datasets():\n",
        """\
seen = {"orders": [[]], "totals": [], "steps": [], "reduced": 0}


class Recorded(TensorDataset):
    def __getitem__(self, index):
        seen["orders"][-1].append(index)
        return super().__getitem__(index)


def watch(model, optimizer):
    def step(*_):
        grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        seen["steps"].append((model.training, torch.stack(grads).norm().item()))

    seen["first_weights"] = {name: w.clone() for name, w in model.state_dict().items()}
    optimizer.register_step_pre_hook(step)


def count(_, bucket):
    seen["reduced"] += bucket.is_last()
    return default_hooks.allreduce_hook(None, bucket)


def load_datasets():
""",
    ),
    (
        "from torch import nn\n",
        "from torch import nn\n"
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n",
    ),
    (
        "    return TensorDataset(shifted,",
        '    seen["split"] = [*map(int, train)], [*map(int, test)]\n    return Recorded(shifted,',
    ),
    (
        "        start = time.perf_counter()\n",
        '        start = time.perf_counter()\n        seen["orders"].append([])\n',
    ),
    (
        "        loss, samples = total.tolist()",
        '        seen["totals"].append(total.tolist())\n        loss, samples = total.tolist()',
    ),
    (
        MAKE,
        f"    watch(model, optimizer)\n{MAKE}    trainer.model.register_comm_hook(None, count)\n",
    ),
    (
        "    dist.barrier()  # wait",
        """\
    seen["weights"] = trainer.model.module.state_dict()
    torch.save(seen, f"seen.{dist.get_rank()}.pt")
    dist.barrier()  # wait""",
    ),
)


def seen(job):
    """Return what each of the two ranks has written down."""
    return [torch.load(job.cwd / f"seen.{rank}.pt", weights_only=True) for rank in (0, 1)]


def orders(job):
    """Return the indices that each rank has trained on in each epoch."""
    return [rank["orders"][1:] for rank in seen(job)]


def how_often(job):
    """Return how many samples the ranks have seen once, twice… in the first epoch."""
    first, second = orders(job)
    return Counter(Counter(first[0] + second[0]).values())


# ---------------------------------------------------------------- which samples, in which order


def test_no_set_epoch(both):
    jobs = both("no_set_epoch", *PROBES, args=THREE)
    for job, different in zip(jobs, (1, 3)):
        for epochs in orders(job):
            assert len(epochs) == 3
            assert len(set(map(tuple, epochs))) == different


@EVERYTHING
def test_late_set_epoch(both):
    broken, ours = both("late_set_epoch", *PROBES, args=THREE)
    for late, right in zip(orders(broken), orders(ours)):
        assert late == [right[0], right[0], right[1]]
        assert right[0] != right[1]


@EVERYTHING
def test_no_sampler(both):
    broken, ours = both("no_sampler", *PROBES, step="02")
    assert how_often(ours) == {1: 12_942}
    assert how_often(broken) == {2: 12_942}
    one, other = orders(broken)
    assert one == other
    one, other = seen(broken)
    assert one["totals"][0][1] == 2 * 12_942
    counts = [len(rank["steps"]) for job in (broken, ours) for rank in seen(job)]
    assert counts == [203, 203, 102, 102]


@EVERYTHING
def test_shuffle_beside_sampler(tmp_path):
    job = run(command(patched(tmp_path, "pitfalls/shuffle_beside_sampler"), *SMALL), tmp_path)
    assert job.returncode == 1
    assert error_lines(job) == on_screen("pitfalls/shuffle_beside_sampler")


@EVERYTHING
def test_rank_seeds_split_data(both):
    """Each of two ranks deals half of an order of its own, so a quarter is dealt by both."""
    broken, ours = both("rank_seeds_split_data", *PROBES, args=THREE)
    assert how_often(ours) == {1: 12_942}
    times = how_often(broken)
    assert times[1] + times[2] * 2 == 12_942
    assert times[2] / 12_942 == pytest.approx(1 / 4, abs=0.02)
    assert 12_942 - times[1] - times[2] == times[2]  # never seen


@EVERYTHING
def test_split_differs_by_rank(both):
    """Expected are 359 * 1438 / 1797 = 287, give or take 7."""
    leaks = []
    for job in both("split_differs_by_rank", *PROBES, args=THREE):
        (train, _), (_, held_out) = (rank["split"] for rank in seen(job))
        trained = {train[i % len(train)] for epoch in orders(job)[0] for i in epoch}
        leaks.append(len(trained & set(held_out)))
    assert 230 < leaks[0] < 340
    assert leaks[1] == 0


@EVERYTHING
def test_same_augmentation(tmp_path):
    """The remedy gives each rank noise of its own."""
    drawn = (
        ("torch.randn_like(source)", "drawn(source)"),
        (
            "def build_model(width):\n",
            """\
def drawn(source):
    seen.setdefault("noise", []).append(torch.randn_like(source))
    return seen["noise"][-1]


def build_model(width):
""",
        ),
    )
    remedy = ("+ self.epochs_run)  # each", "+ self.epochs_run + 1000 * dist.get_rank())  # each")
    for name, changes in ("broken", ()), ("remedied", (remedy,)):
        (tmp_path / name).mkdir()
        path = patched(tmp_path / name, "pitfalls/same_augmentation", *PROBES, *drawn, *changes)
        one, other = seen(finished(command(path, "1", *SMALL), tmp_path / name))
        assert one["orders"] != other["orders"]
        assert len(one["noise"]) == 102
        same = {torch.equal(*noise) for noise in zip(one["noise"], other["noise"], strict=True)}
        assert same == {name == "broken"}


# ---------------------------------------------------------------- how many batches


@EVERYTHING
def test_uneven_batches(tmp_path):
    """Rank 1 has 98 batches and sums up its loss; rank 0 has 105 and averages gradients."""
    train = "        self.model.train()\n"
    said = (train, f"        print(dist.get_rank(), len(self.train_data))\n{train}")
    path = patched(tmp_path, "pitfalls/uneven_batches", SHORT, said)
    job = run(command(path, *SMALL), tmp_path)
    assert job.returncode == 1
    assert sorted(job.stdout.splitlines()) == ["0 105", "1 98"]
    assert all(text in job.stderr for text in on_screen("pitfalls/uneven_batches"))
    assert re.search("Aborted.*in all_reduce", job.stderr, re.DOTALL)


# ---------------------------------------------------------------- evaluation


@EVERYTHING
def test_missing_barrier(tmp_path):
    """The writer is slow: rank 1 finds no file, or the file of the epoch before."""
    replace = "        os.replace("
    slow = (replace, f"        time.sleep(5)\n{replace}")
    load = "        checkpoint = torch.load(args.checkpoint_path, map_location=device"
    barrier = (load, f"        dist.barrier()\n{load}")
    path = patched(tmp_path, "pitfalls/missing_barrier", SHORT, slow)
    job = run(command(path, "1", *SMALL), tmp_path)
    assert job.returncode == 1
    [text] = on_screen("pitfalls/missing_barrier")
    assert f"FileNotFoundError: [Errno 2] {text}" in error_lines(job)
    assert re.search(rf"^\[rank1\]: .*{text}", job.stderr, re.MULTILINE)
    assert not re.search(rf"^\[rank0\]: .*{text}", job.stderr, re.MULTILINE)
    for changes, same in ((), False), ((barrier,), True):
        folder = tmp_path / str(same)
        folder.mkdir()
        path = patched(folder, "pitfalls/missing_barrier", *PROBES, slow, *changes)
        one, other = (
            rank["weights"] for rank in seen(finished(command(path, "2", *SMALL), folder))
        )
        assert all(torch.equal(one[name], other[name]) for name in one) == same


@EVERYTHING
def test_padded_evaluation(both):
    broken, ours = both("padded_evaluation", *PROBES, args=THREE)
    assert accuracy(broken)[2] == 360
    assert accuracy(ours)[2] == 359
    for text, job in zip(on_screen("pitfalls/padded_evaluation"), (broken, ours), strict=True):
        assert job.stdout.endswith(f"{text}\n")


def from_the_matrix(job):
    """Return the accuracy that follows from the confusion matrix."""
    rows = re.findall(r"^[ \[]\[([ \d]+)\]+$", job.stdout, re.MULTILINE)
    matrix = torch.tensor([[int(number) for number in row.split()] for row in rows])
    assert matrix.shape == (10, 10)
    assert matrix.sum() == 359
    return f"accuracy {matrix.trace() / matrix.sum():.2%}"


@EVERYTHING
def test_mean_of_means(trained_with, tmp_path):
    path = patched(tmp_path, "pitfalls/mean_of_means")
    broken = finished(command(path, "1", "--batch-size=179", "--width=4"), tmp_path)
    ours = trained_with("05", PROBES, THREE)
    assert from_the_matrix(ours) == ours.stdout.splitlines()[-1].split(" (")[0]
    assert from_the_matrix(broken) != broken.stdout.splitlines()[-1]
