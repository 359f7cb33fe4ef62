"""Step 5: all ranks evaluate together, and it comes out as if one had done it alone."""

import re
import shutil

import pytest
import torch
from conftest import LONG, SMALL, accuracy, command, edited, finished, load, same_bits, weights
from sklearn.metrics import classification_report, confusion_matrix


def alone(job):
    """Return the predictions of one process with the weights of a run, and the test set."""
    module = load("05")
    model = module.DigitReader(4)
    model.load_state_dict(weights(job))
    test_set = module.Digits(train=False)
    return model(test_set.tensors[0]).argmax(dim=1), *test_set.tensors


def check_report(job, batch):
    """Compare every printed number, and every drawn digit, with what one process finds."""
    predictions, images, labels = alone(job)
    correct = int((predictions == labels).sum())
    assert accuracy(job)[1:] == (correct, 359)
    assert classification_report(labels, predictions, zero_division=0) in job.stdout
    assert str(confusion_matrix(labels, predictions)) in job.stdout
    wrong = (predictions != labels).nonzero().flatten().tolist()
    told = [tuple(map(int, pair)) for pair in re.findall(r"meant (\d), read (\d)", job.stdout)]
    assert told == [(int(labels[i]), int(predictions[i])) for i in wrong]
    lines = job.stdout.splitlines()
    top = next(
        number for number, line in enumerate(lines) if line.startswith("meant ") and "," in line
    )
    for row in range(8):  # the first of them, pixel by pixel: the more ink, the darker the letter
        drawn = [" .:-=+*#%@".index(letter) for letter in lines[top + 1 + row].ljust(16)[:16:2]]
        assert drawn == [int(9 * ink) for ink in images[wrong[0], 0, row]]
    same = f"checkpoint.pt in a plain model: {batch} of {batch} predictions the same"
    assert same in job.stdout.splitlines()


def test_two_processes(trained):
    job = trained("05", *LONG)
    check_report(job, 64)
    assert same_bits(job, trained("03", *LONG))


@pytest.mark.parametrize(
    "nprocs", [3, *(pytest.param(n, marks=pytest.mark.everything) for n in (1, 4, 5, 8, 16))]
)
def test_exact_at_any_world_size(trained, tmp_path, nprocs):
    """With the weights of a finished run; with 359 in a batch, most ranks have none to fill."""
    shutil.copy(trained("05", *LONG).cwd / "checkpoint.pt", tmp_path)
    job = finished(command("05", *LONG, "--batch-size=359", nprocs=nprocs), tmp_path)
    check_report(job, 359)
    assert accuracy(job) == accuracy(trained("05", *LONG))


def test_the_loss_is_that_of_all_ranks(trained):
    """One process that runs the same steps sees the whole epoch itself."""
    mean = re.findall(r"^epoch 1  loss ([\d.]+)  ", trained("05", *LONG).stdout, re.MULTILINE)
    shard = re.findall(r"rank 0's loss ([\d.]+)", trained("03", *LONG).stdout)[0]
    assert mean[0] != shard
    module = load("02")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, data = module.DigitReader(4), module.Digits(train=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = module.DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(1)
    total = 0
    for images, labels in module.DataLoader(data, 128, sampler=sampler, collate_fn=tuple):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    torch.set_num_threads(threads)
    assert float(mean[0]) == pytest.approx(total / len(data), rel=2e-3)


@pytest.mark.everything
def test_all_ranks_evaluate_or_they_wait_for_each_other(tmp_path):
    """If one of them waits for another in vain, that ends soon here, and as an error."""
    short = edited(tmp_path, "05", ("timedelta(minutes=5)", "timedelta(seconds=20)"))
    assert accuracy(finished(command(short, "1", *SMALL), tmp_path))[2] == 359


def test_padding_would_count_some_digits_twice():
    module = load("05")
    test_set = module.Digits(train=False)
    padded = [
        index
        for rank in range(2)
        for index in module.DistributedSampler(test_set, 2, rank, shuffle=False)
    ]
    assert len(padded) == 360
    assert sorted(padded)[:2] == [0, 0]
    for world_size in (1, 2, 3, 5, 7, 359, 400):
        shards = [range(rank, 359, world_size) for rank in range(world_size)]
        assert sorted(index for shard in shards for index in shard) == list(range(359))
