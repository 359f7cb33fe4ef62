"""The steps still work with a reader's own model, data set and DataLoader."""

from inspect import getsource

import pytest
import torch
from support.jobs import finished, run
from support.positions import KILLED, ON_RANK_1, at
from support.results import accuracy, epochs, printed_by, resumed, same_bits
from support.scripts import edited, forked, load, on_each_rank

SLOW = pytest.mark.slow
ARGS = ("3", "--batch-size=16", "--width=4")
WORKERS = "--num-workers=2"
# Like torchrun, this signals the whole process group of a rank, including its DataLoader workers.
TOLD_AT = at(1, 25, "os.killpg(0, signal.SIGTERM)", ON_RANK_1)

DATA = '''class Scans(torch.utils.data.Dataset):
    """One file for each scan."""

    def __init__(self, folder, noise):
        self.paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
        self.noise = noise

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        scan, label = torch.load(self.paths[index])
        return scan + self.noise * torch.randn_like(scan), label


def load_datasets():
    return Scans("{folder}/train", {noise}), Scans("{folder}/test", 0)
'''
MODEL = """def build_model(width):
    body = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*body, nn.Dropout({dropout}), nn.Flatten(), nn.Linear(64 * width, 10))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return a function that returns the changes to a step for another model and data set.

    One file is written per scan, 1438 for training and 359 held out.
    """
    folder = tmp_path_factory.mktemp("scans")
    module = load("01")
    train, test = module.load_datasets()
    unshifted = range(4 * 1438, 5 * 1438)  # the fifth of the nine shifts
    for name, dataset, indices in (("train", train, unshifted), ("test", test, range(359))):
        (folder / name).mkdir()
        for index in indices:
            scan, label = dataset[index]
            torch.save((scan.clone(), label.item()), folder / name / f"{index:05}.pt")

    def changes(random=False):
        data = DATA.format(folder=folder, noise=0.1 * random)
        model = MODEL.format(dropout=0.2 * random)
        return (getsource(module.load_datasets), data), (getsource(module.build_model), model)

    return changes


# ---------------------------------------------------------------- told to stop


def test_told_to_stop_in_mid_epoch(own, trained_with, tmp_path):
    """The model has BatchNorm, and each sample is a file. Loader workers do not change a bit."""
    start = forked(edited(tmp_path, "04", *own(), TOLD_AT), *ARGS, WORKERS)
    job = run(start, tmp_path)
    assert "interrupted after 960 samples" in job.stdout, job
    again = finished(start, tmp_path)
    assert epochs(job) + epochs(again) == [1, 2, 3]
    assert accuracy(again)[0] > 90
    assert same_bits(again, trained_with("03", own(), ARGS))


@SLOW
def test_a_resume_in_mid_epoch_draws_other_random_numbers(own, trained_with, tmp_path):
    """Checkpoints do not hold the random state. Between epochs, they do not have to: see below."""
    start = forked(edited(tmp_path, "04", *own(random=True), TOLD_AT), *ARGS)
    job = run(start, tmp_path)
    assert "interrupted after 960 samples" in job.stdout, job
    again = finished(start, tmp_path)
    assert accuracy(again)[0] > 90
    assert not same_bits(again, trained_with("03", own(random=True), ARGS))


# ---------------------------------------------------------------- killed


@SLOW
def test_a_kill_with_dropout_augmentation_and_loader_workers(own, trained_with, tmp_path):
    script = edited(tmp_path, "03", *own(random=True), at(1, 25, KILLED, ON_RANK_1))
    job = finished(forked(script, *ARGS, WORKERS, restarts=1), tmp_path)
    assert resumed(job) == [1]
    assert same_bits(job, trained_with("03", own(random=True), (*ARGS, WORKERS)))


@SLOW
def test_all_ranks_evaluate_with_the_statistics_of_rank_0(own, tmp_path):
    line = "    correct = torch.tensor(0)\n"
    show = f"    {on_each_rank('model[1].running_mean.tolist()')}{line}"
    script = edited(tmp_path, "05", *own(), (line, show))
    job = finished(forked(script, "1", *ARGS[1:]), tmp_path)
    assert printed_by(job, 0) == printed_by(job, 1) != []
