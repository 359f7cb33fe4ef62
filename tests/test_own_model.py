"""What a reader changes must not break the steps: the model, the data set, the DataLoader."""

import re
import signal

import psutil
import pytest
import torch
from support.jobs import RESTARTS, Job, finished, kill, run
from support.results import accuracy, epochs, resumed, same_bits
from support.scripts import SCRIPT, command, edited, load

EVERYTHING = pytest.mark.everything
ARGS = ("6", "--batch-size=16", "--width=4")
STEP = 2 * 16  # samples of both ranks
NO_WORKERS = ""
FORK = ', num_workers=2, multiprocessing_context="fork"'
SPAWN = ', num_workers=2, multiprocessing_context="spawn"'
PERSISTENT = ", persistent_workers=True"

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
    """Write 1438 scans to train on, and 359 held out, one file each."""
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
    """Write a copy of a step with another model, data set and loader, and return its command."""

    def write(tmp_path, step, loader, random=False, told_at=None, torchrun=(), args=ARGS):
        script = SCRIPT[step].read_text(encoding="utf-8")

        def function(name):
            return re.search(rf"^def {name}\(.*?\n(?=\n\n)", script, re.DOTALL | re.MULTILINE)[0]

        changes = [
            (function("load_datasets"), DATA.format(folder=folder, noise=0.1 * random)),
            (function("build_model"), MODEL.format(dropout=0.2 * random)),
            ("pin_memory=pin", f"pin_memory=pin{loader}"),
        ]
        if told_at:  # torchrun, too, signals the process group of each worker
            line = "            total[0] += self._run_batch(source, targets)\n"
            here = "((self.epochs_run, self.samples_run), dist.get_rank())"
            told = f"            if {here} == ({told_at}, 1):\n"
            changes.append((line, f"{told}                os.killpg(0, signal.SIGTERM)\n{line}"))
        return command(edited(tmp_path, step, *changes), *args, torchrun=torchrun)

    return write


@pytest.fixture(scope="module")
def undisturbed(own, tmp_path_factory):
    """Train without a fault; the same arguments run only once."""
    done = {}

    def train(step, loader, random=False):
        if (step, loader, random) not in done:
            path = tmp_path_factory.mktemp("undisturbed")
            done[step, loader, random] = finished(own(path, step, loader, random), path)
            assert accuracy(done[step, loader, random])[0] > 90
        return done[step, loader, random]

    return train


def trainers(job):
    """Return the processes that torchrun started, which do not include the loader's workers."""
    return psutil.Process(job.process.pid).children()


# ---------------------------------------------------------------- told to stop


@pytest.mark.parametrize(
    ("step", "loader"),
    [
        ("04", FORK),
        pytest.param("05", SPAWN + PERSISTENT, marks=EVERYTHING),
        pytest.param("04", NO_WORKERS, marks=EVERYTHING),
        pytest.param("04", FORK + PERSISTENT, marks=EVERYTHING),
    ],
)
def test_told_to_stop_in_mid_epoch(own, undisturbed, tmp_path, step, loader):
    """With BatchNorm and a file for each sample; the workers change no bit, nor does the step."""
    start = own(tmp_path, step, loader, told_at=(1, 25 * STEP))
    with Job(start, tmp_path) as job:
        job.wait().wait_until_gone()
    assert "interrupted after 960 samples" in job.stdout, job
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["SAMPLES_RUN"] == 30 * STEP
    again = finished(start, tmp_path)
    assert epochs(job) + epochs(again) == [1, 2, 3, 4, 5, 6]
    assert same_bits(again, undisturbed("02", NO_WORKERS))


@EVERYTHING
def test_the_agent_is_told_to_stop(own, undisturbed, tmp_path):
    start = own(tmp_path, "04", FORK)
    with Job(start, tmp_path) as job:
        job.wait_for("^epoch 1 ")
        job.process.send_signal(signal.SIGTERM)
        job.wait().wait_until_gone()
    assert "interrupted after" in job.stdout, job
    assert same_bits(finished(start, tmp_path), undisturbed("02", NO_WORKERS))


@EVERYTHING
def test_a_resume_in_mid_epoch_draws_other_random_numbers(own, undisturbed, tmp_path):
    """A checkpoint does not hold the random state. Between epochs it need not: see below."""
    start = own(tmp_path, "04", NO_WORKERS, random=True, told_at=(1, 25 * STEP))
    with Job(start, tmp_path) as job:
        job.wait().wait_until_gone()
    assert "interrupted after 960 samples" in job.stdout, job
    again = finished(start, tmp_path)
    assert accuracy(again)[0] > 90
    assert not same_bits(again, undisturbed("02", NO_WORKERS, random=True))


# ---------------------------------------------------------------- killed


@EVERYTHING
@pytest.mark.parametrize("step", ["03", "04", "05"])
def test_kill_9_and_restart(own, undisturbed, tmp_path, step):
    """With BatchNorm, dropout, and data that loader workers augment at random."""
    start = own(tmp_path, step, FORK, random=True, torchrun=("--max-restarts=1",))
    with Job(start, tmp_path, RESTARTS) as job:
        job.wait_for("^epoch 2 ")  # so the first was saved
        kill(trainers(job)[1])
        assert job.wait().returncode == 0, job
        job.wait_until_gone()
    assert resumed(job)
    assert same_bits(job, undisturbed("02", FORK, random=True))


@EVERYTHING
@pytest.mark.parametrize("step", ["01", "02"])
def test_started_again(own, undisturbed, tmp_path, step):
    finished(own(tmp_path, step, FORK, random=True, args=("2", *ARGS[1:])), tmp_path)
    job = finished(own(tmp_path, step, FORK, random=True), tmp_path)
    assert resumed(job) == [2]
    assert same_bits(job, undisturbed(step, FORK, random=True))


@EVERYTHING
@pytest.mark.parametrize("method", [FORK, SPAWN])
def test_kill_9_leaves_no_loader_worker(own, tmp_path, method):
    """Each one notices within seconds that its parent is gone."""
    with Job(own(tmp_path, "04", method + PERSISTENT), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        loader_workers = len(job.processes()) - 3
        for process in (psutil.Process(job.process.pid), *trainers(job)):
            process.kill()
        job.wait()
        job.wait_until_gone()
    assert loader_workers >= 4


@EVERYTHING
def test_all_ranks_evaluate_with_the_statistics_of_rank_0(own, tmp_path):
    path = own(tmp_path, "05", NO_WORKERS, args=("1", *ARGS[1:]))
    script = tmp_path / SCRIPT["05"].name
    text = script.read_text(encoding="utf-8")
    line = "    counts = torch.tensor("
    assert text.count(line) == 1
    show = "    print(f'mean {model[1].running_mean.tolist()}\\n', end='', flush=True)\n"
    script.write_text(text.replace(line, show + line), encoding="utf-8")
    first, second = re.findall("^mean (.*)$", finished(path, tmp_path).stdout, re.MULTILINE)
    assert first == second


@EVERYTHING
def test_an_exception_in_a_loader_worker(tmp_path):
    """Python sends SIGTERM to the workers, too, and waits for them: they must end at last."""
    worker = ("=ignore_sigterm", "=ignore_sigterm, num_workers=2")
    soon = ("signal.alarm(300)", "signal.alarm(3)")
    broken = ("    return TensorDataset(shifted,", "    return BrokenData(shifted,")
    data = (
        "def load_datasets():\n",
        """\
class BrokenData(TensorDataset):
    def __getitem__(self, index):
        if index % 1000 == 999:
            raise ValueError("a sample is broken")
        return super().__getitem__(index)


def load_datasets():
""",
    )
    job = run(command(edited(tmp_path, "04", worker, soon, broken, data), "1"), tmp_path)
    assert job.returncode == 1
    assert "ValueError: a sample is broken" in job.stderr
