"""Recipes for long runs: the state of the DataLoader, and checkpoints written in the background."""

import re
import shutil

import pytest
import torch
from support.jobs import finished, run
from support.positions import AT_ONCE, BATCH, stopped, told, writes_nothing_again
from support.results import epochs, resumed, same_bits, weights
from support.scripts import LONG, SMALL, forked, page, patched
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SLOW = pytest.mark.slow
TWO = ("2", *SMALL)
SAMPLES = ("        speed = ", '        log(f"{samples:.0f} samples")\n        speed = ')


# ---------------------------------------------------------------- the DataLoader's state


NOTHING_LOADED = ("staticmethod(torch.set_rng_state)", "lambda *_: None")


@SLOW
def test_stateful_loader(tmp_path, trained):
    """A resumed run is bit-for-bit identical, but not without the states of the workers."""
    pytest.importorskip("torchdata", reason="pip install -r requirements-dev.txt")
    recipe, jobs = "recipes/stateful_loader", {}
    (tmp_path / "told").mkdir()
    stopped(patched(tmp_path / "told", recipe, told(1)), *TWO)
    for name, nprocs, *changes in (
        ("undisturbed", 2),
        ("again", 2),
        ("without states", 2, NOTHING_LOADED),
        ("alone", 1, SAMPLES),
    ):
        folder = tmp_path / name
        if name == "undisturbed":
            folder.mkdir()
        else:
            shutil.copytree(tmp_path / "told", folder)
        jobs[name] = finished(
            forked(patched(folder, recipe, *changes), *TWO, nprocs=nprocs), folder
        )
        assert resumed(jobs[name]) == [1] * (name != "undisturbed")
    assert same_bits(jobs["again"], jobs["undisturbed"])
    assert not same_bits(jobs["without states"], jobs["undisturbed"])
    # In another world the epoch starts again, with all of its samples.
    assert re.findall(r"^(\d+) samples$", jobs["alone"].stdout, re.MULTILINE) == ["12942"]

    states = torch.load(tmp_path / "told" / "checkpoint.pt", weights_only=True)["LOADER_STATES"]
    generators = [
        worker["dataset_state"]
        for state in states
        for worker in state["_snapshot"]["_worker_snapshots"].values()
    ]
    assert len({tuple(generator.tolist()) for generator in generators}) == 4
    assert [generator.nbytes for generator in generators] == [5056] * 4
    files = [job.cwd / "checkpoint.pt" for job in (jobs["undisturbed"], trained("05", *TWO))]
    grown = files[0].stat().st_size - files[1].stat().st_size
    assert f"{round(grown, -3) // 1000} kB" in page(recipe)
    assert "5056 bytes" in page(recipe)


def test_number_of_workers_must_stay():
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    two, one = (loaders.StatefulDataLoader(range(8), num_workers=count) for count in (2, 1))
    next(iter(two))
    one.load_state_dict(two.state_dict())
    with pytest.raises(AssertionError):
        iter(one)


# ---------------------------------------------------------------- checkpoints in the background
# ---------------------------------------------------------------- checkpoints in the background

# Rank 1 writes its part only when the next epoch is under way; of epoch 2, it is killed instead.
LATE = """\
            if dist.get_rank() == 1:
                epoch, write = self.epochs_run, dcp.FileSystemWriter.write_data

                def late(*args):
                    dcp.FileSystemWriter.write_data = write
                    while self.position < (epoch, 20):
                        time.sleep(0.01)
                    if epoch == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return write(*args)

                dcp.FileSystemWriter.write_data = late
            written = dcp.async_save("""
LATE = [
    ("            written = dcp.async_save(", LATE),
    (BATCH, f"{BATCH}            self.position = self.epochs_run, step\n"),
]


# The last write takes longer than the evaluation after it.
SLOW = """\
            if self.epochs_run == 4:
                write = dcp.FileSystemWriter.write_data
                dcp.FileSystemWriter.write_data = lambda *args: time.sleep(3) or write(*args)
            written = dcp.async_save("""
SLOW = ("            written = dcp.async_save(", SLOW)


def last_folder(job):
    """Return the folder that the checkpoint of a job names."""
    return job.cwd / torch.load(job.cwd / "checkpoint.pt", weights_only=True)["FOLDER"]


@SLOW
def test_async_checkpoint(tmp_path, trained):
    """Training continues during a save; a rank that is killed then leaves the checkpoint before."""
    recipe = "recipes/async_checkpoint"
    killed = run(forked(patched(tmp_path, recipe, *LATE), *LONG), tmp_path)
    assert killed.returncode == 1, killed
    assert last_folder(killed).name == "checkpoint.pt.1-0"
    assert not (tmp_path / "checkpoint.pt.2-0" / ".metadata").exists()
    writes_nothing_again(patched(tmp_path, recipe, AT_ONCE), *LONG)
    again = stopped(patched(tmp_path, recipe, told(2)), *LONG)
    assert resumed(again) == [1]
    assert (tmp_path / "checkpoint.pt.interrupted").exists()
    job = finished(forked(patched(tmp_path, recipe, SLOW), *LONG), tmp_path)
    assert resumed(job) == [2]
    assert last_folder(job).name == "checkpoint.pt.4-0"
    dcp_to_torch_save(last_folder(job), tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)["model_state_dict"]
    expected = weights(trained("05", *LONG))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@SLOW
def test_async_checkpoint_in_the_group_of_training(tmp_path):
    """While rank 1 has yet to write, rank 0 calls the next collective of the save."""
    recipe = "recipes/async_checkpoint"
    shared = (", process_group=self.saving_group", "")
    short = ("timedelta(minutes=5)", "timedelta(seconds=5)")
    job = run(forked(patched(tmp_path, recipe, *LATE, shared, short), *LONG), tmp_path)
    assert job.returncode == 1, job
    assert re.search("Timed out waiting|Application timeout", job.stderr), job
    assert epochs(job) == [1]
    assert not (tmp_path / "checkpoint.pt").exists()
