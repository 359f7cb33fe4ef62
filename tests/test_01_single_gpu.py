"""Step 1 learns, saves and resumes, and has no distributed code."""

import re

import pytest
import torch
from support.jobs import finished, run
from support.results import accuracy, epochs, error_lines, resumed, same_bits, weights
from support.scripts import LONG, SCRIPT, SMALL, arguments, build_trainer, forked, load


def test_learns_with_the_default_arguments(trained):
    job = trained("01")
    percent, correct, total = accuracy(job)
    assert percent >= 98
    assert total == 359
    assert epochs(job) == [1, 2, 3, 4]
    assert len(job.stdout.splitlines()) == 5
    assert re.match(r"epoch 1  loss \d\.\d{4}  \d{1,3}(,\d{3})* samples/s\n", job.stdout)
    module = load("01")
    model = module.build_model(32)
    model.load_state_dict(weights(job))
    images, labels = module.load_datasets()[1].tensors
    assert (model(images).argmax(dim=1) == labels).sum() == correct
    assert sum(parameter.numel() for parameter in model.parameters()) == 113_162


def test_has_no_distributed_word():
    text = SCRIPT["01"].read_text(encoding="utf-8").lower()
    words = r"distributed|\brank|world|\bddp|nccl|gloo|torchrun|spawn|sampler\(|barrier|all_reduce"
    assert not re.search(words, text)


def test_data():
    train, test = load("01").load_datasets()
    assert (len(train), len(test)) == (12_942, 359)
    assert all(359 % divisor for divisor in range(2, 20))
    images, labels = train.tensors
    assert images.shape == (12_942, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    nine = images.reshape(3, 3, 1438, 1, 8, 8)
    padded = torch.nn.functional.pad(nine[1, 1], (1, 1, 1, 1))  # [1, 1] is the unshifted scan
    for down in range(3):
        for right in range(3):
            assert torch.equal(nine[down, right], padded[:, :, down : down + 8, right : right + 8])
    assert torch.equal(labels.reshape(9, 1438), labels[:1438].expand(9, -1))
    held_out = {image.numpy().tobytes() for image in test.tensors[0]}
    assert not held_out & {image.numpy().tobytes() for image in nine[1, 1]}


def trainer(path, **changes):
    return build_trainer(load("01"), arguments(path, **{"batch_size": 4096, **changes}))


def test_the_seed_decides(tmp_path):
    results = []
    for number, seed in enumerate((0, 0, 1)):
        trainer(tmp_path / f"{number}.pt", seed=seed).train(1, 1)
        results.append(weights(tmp_path / f"{number}.pt")["0.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_saves_every_so_many_epochs_and_after_the_last(tmp_path):
    saves = []
    trained = trainer(tmp_path / "checkpoint.pt")
    save = trained._save_checkpoint

    def watched():
        save()
        assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint.pt"]
        saves.append(trained.epochs_run)

    trained._save_checkpoint = watched
    trained.train(total_epochs=5, save_every=2)
    assert saves == [2, 4, 5]


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(trained, tmp_path):
    finished(forked("01", "2", *SMALL), tmp_path)
    job = finished(forked("01", *LONG), tmp_path)
    assert resumed(job) == [2]
    assert epochs(job) == [3, 4]
    assert same_bits(job, trained("01", *LONG))


@pytest.mark.parametrize("lr", ["-1", "nan"])
def test_a_wrong_learning_rate_leaves_the_checkpoint_alone(tmp_path, lr):
    (tmp_path / "checkpoint.pt").write_bytes(b"precious")
    job = run(forked("01", f"--lr={lr}"), tmp_path)
    assert job.returncode == 1
    assert error_lines(job) == [f"ValueError: Invalid learning rate: {float(lr)}"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"precious"
