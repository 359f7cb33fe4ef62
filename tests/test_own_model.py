"""The steps still work with a reader's own model, data set and DataLoader."""

import re
from functools import cache

import pytest
import torch
from support.jobs import finished, run
from support.positions import KILLED, ON_RANK_1, at
from support.results import accuracy, epochs, resumed, said, same_bits
from support.scripts import SCRIPT, edited, forked, load, on_each_rank

SLOW = pytest.mark.slow
AGAIN = pytest.mark.weekly("the same in another step")
ARGS = ("3", "--batch-size=16", "--width=4")
WORKERS = "--num-workers=2"
STEP = 2 * 16  # samples of both ranks
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
def folder(tmp_path_factory):
    """Write one file per scan, 1438 for training and 359 held out; return the folder."""
    path = tmp_path_factory.mktemp("scans")
    train, test = load("01").load_datasets()
    unshifted = range(4 * 1438, 5 * 1438)  # the fifth of the nine shifts
    for name, dataset, indices in (("train", train, unshifted), ("test", test, range(359))):
        (path / name).mkdir()
        for index in indices:
            scan, label = dataset[index]
            torch.save((scan.clone(), label.item()), path / name / f"{index:05}.pt")
    return path


@pytest.fixture(scope="module")
def own(folder):
    """Return a function that writes a copy of a step with another model and data set."""

    def write(tmp_path, step, *changes, random=False):
        script = SCRIPT[step].read_text(encoding="utf-8")

        def function(name):
            return re.search(rf"^def {name}\(.*?\n(?=\n\n)", script, re.DOTALL | re.MULTILINE)[0]

        own = [
            (function("load_datasets"), DATA.format(folder=folder, noise=0.1 * random)),
            (function("build_model"), MODEL.format(dropout=0.2 * random)),
        ]
        return edited(tmp_path, step, *own, *changes)

    return write


@pytest.fixture(scope="module")
def undisturbed(own, tmp_path_factory):
    """Return a function that trains without a fault, once for the same arguments."""

    @cache
    def train(*options, random=False):
        path = tmp_path_factory.mktemp("undisturbed")
        job = finished(forked(own(path, "03", random=random), *ARGS, *options), path)
        assert accuracy(job)[0] > 90
        return job

    return train


# ---------------------------------------------------------------- told to stop


def test_told_to_stop_in_mid_epoch(own, undisturbed, tmp_path):
    """The model has BatchNorm, and each sample is a file. Loader workers do not change a bit."""
    start = forked(own(tmp_path, "04", TOLD_AT), *ARGS, WORKERS)
    job = run(start, tmp_path)
    assert "interrupted after 960 samples" in job.stdout, job
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["SAMPLES_RUN"] == 30 * STEP
    again = finished(start, tmp_path)
    assert epochs(job) + epochs(again) == [1, 2, 3]
    assert same_bits(again, undisturbed())


@SLOW
def test_a_resume_in_mid_epoch_draws_other_random_numbers(own, undisturbed, tmp_path):
    """Checkpoints do not hold the random state. Between epochs, they do not have to: see below."""
    start = forked(own(tmp_path, "04", TOLD_AT, random=True), *ARGS)
    job = run(start, tmp_path)
    assert "interrupted after 960 samples" in job.stdout, job
    again = finished(start, tmp_path)
    assert accuracy(again)[0] > 90
    assert not same_bits(again, undisturbed(random=True))


# ---------------------------------------------------------------- killed


@SLOW
@pytest.mark.parametrize("step", ["03", *(pytest.param(n, marks=AGAIN) for n in ("04", "05"))])
def test_a_kill_with_dropout_augmentation_and_loader_workers(own, undisturbed, tmp_path, step):
    script = own(tmp_path, step, at(1, 25, KILLED, ON_RANK_1), random=True)
    job = finished(forked(script, *ARGS, WORKERS, restarts=1), tmp_path)
    assert resumed(job) == [1]
    assert same_bits(job, undisturbed(WORKERS, random=True))


@SLOW
def test_all_ranks_evaluate_with_the_statistics_of_rank_0(own, tmp_path):
    line = "    correct = torch.tensor(0)\n"
    show = f"    {on_each_rank('model[1].running_mean.tolist()')}{line}"
    script = own(tmp_path, "05", (line, show))
    job = finished(forked(script, "1", *ARGS[1:]), tmp_path)
    assert said(job, 0) == said(job, 1) != []
