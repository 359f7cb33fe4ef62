"""Step 1: it learns, it saves, it refuses bad input, and it knows nothing of other processes."""

import re

import pytest
import torch
from conftest import SCRIPT, accuracy, arguments, command, epochs, load, run, weights


def test_learns_with_the_default_arguments(trained):
    job = trained("01")
    percent, correct, total = accuracy(job)
    assert percent >= 98
    assert total == 359
    assert epochs(job) == [1, 2, 3, 4]
    assert len(job.stdout.splitlines()) == 5
    assert re.match(r"epoch 1  loss \d\.\d{4}  \d{1,3}(,\d{3})* samples/s\n", job.stdout)
    module = load("01")
    model = module.DigitReader(32)
    model.load_state_dict(weights(job))
    images, labels = module.Digits(train=False).tensors
    assert (model(images).argmax(dim=1) == labels).sum() == correct
    assert sum(parameter.numel() for parameter in model.parameters()) == 113_162


def test_has_no_distributed_word():
    text = SCRIPT["01"].read_text(encoding="utf-8").lower()
    words = r"distributed|\brank|world|\bddp|nccl|gloo|torchrun|spawn|sampler\(|barrier|all_reduce"
    assert not re.search(words, text)


def test_data():
    module = load("01")
    train, test = module.Digits(train=True), module.Digits(train=False)
    assert (len(train), len(test)) == (12_942, 359)
    assert all(359 % divisor for divisor in range(2, 20))
    images, labels = train.tensors
    assert images.shape == (12_942, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    nine = images.reshape(1438, 3, 3, 8, 8)
    padded = torch.nn.functional.pad(nine[:, 1, 1], (1, 1, 1, 1))  # the middle one is the scan
    for down in range(3):
        for right in range(3):
            assert torch.equal(nine[:, down, right], padded[:, down : down + 8, right : right + 8])
    assert torch.equal(labels.reshape(1438, 9), labels[::9, None].expand(-1, 9))
    held_out = {image.numpy().tobytes() for image in test.tensors[0]}
    assert not held_out & {image.numpy().tobytes() for image in nine[:, 1, 1]}


def test_a_batch_is_what_its_samples_are():
    data = load("01").Digits(train=True)
    images, labels = data.__getitems__([7, 0, 12_941])
    for position, index in enumerate((7, 0, 12_941)):
        assert torch.equal(images[position], data[index][0])
        assert labels[position] == data[index][1]


def trainer(module, path, **changes):
    args = arguments(path, **{"batch_size": 4096, **changes})
    train_set, _, model, optimizer = module.load_train_objs(args)
    data = module.prepare_dataloader(train_set, args)
    return module.Trainer(model, data, optimizer, torch.device("cpu"), args)


def test_the_seed_decides(tmp_path):
    module, results = load("01"), []
    for seed in (0, 0, 1):
        trainer(module, tmp_path / "checkpoint.pt", seed=seed).train()
        results.append(weights(tmp_path / "checkpoint.pt")["0.weight"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_saves_every_so_many_epochs_and_after_the_last(tmp_path):
    module, saves = load("01"), []
    trained = trainer(module, tmp_path / "checkpoint.pt", total_epochs=5, save_every=2)
    save = trained._save_checkpoint

    def watched():
        save()
        assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint.pt"]
        saves.append(trained.epochs_run)

    trained._save_checkpoint = watched
    trained.train()
    assert saves == [2, 4, 5]


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "checkpoint.pt").mkdir()
    with pytest.raises(SystemExit) as stop:
        trainer(load("01"), tmp_path / "checkpoint.pt").train()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot write {tmp_path / 'checkpoint.pt'}" in line


def test_a_bad_argument_leaves_the_checkpoint_alone(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"precious")
    job = run(command("01", "--lr=-1"), tmp_path)
    assert job.returncode == 2
    assert job.stderr.splitlines() == ["01_single_gpu.py: error: lr must be positive, not -1.0"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"precious"
