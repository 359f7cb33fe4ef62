"""Checkpoints are written whole or not at all; a bad one is named and left unchanged."""

import os
from pathlib import Path

import pytest
import torch
from support.jobs import finished, run
from support.results import resumed, same_bits
from support.scripts import FOUR_EPOCHS, edited, forked

# ---------------------------------------------------------------- loading


class Pickled:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.fixture(params=["01", "04"])  # 02 and 03 load and train as 01 does, and 05 as 04 does
def step(request):
    return request.param


@pytest.fixture
def trainer(build_trainer, step):
    """Return a Trainer that has run one batch and saved checkpoint.pt in the current folder."""
    trainer = build_trainer(step)
    trainer._run_batch(*next(iter(trainer.train_loader)))
    trainer._save_checkpoint()
    return trainer


@pytest.fixture
def path(trainer, tmp_path):
    return tmp_path / "checkpoint.pt"


def refused(build_trainer, *args):
    """Check that a new Trainer refuses the checkpoint and leaves it unchanged; return why."""
    before = Path("checkpoint.pt").read_bytes()
    with pytest.raises(RuntimeError) as error:
        build_trainer(*args)
    assert Path("checkpoint.pt").read_bytes() == before
    (line,) = str(error.value).splitlines()
    assert line.startswith("cannot load checkpoint.pt, move it away: ")
    return line


def test_what_is_no_checkpoint_is_refused(build_trainer, step, path):
    whole = path.read_bytes()
    cut = [whole[:length] for length in range(0, len(whole), 1000)]
    for content in (*cut, whole[:-1], b"not a checkpoint", bytes(10_000)):
        path.write_bytes(content)
        refused(build_trainer, step)
    for other in ([], {}, {"MODEL_STATE": {}}, {"CONFIG": {}}):  # saved by another program
        torch.save(other, path)
        refused(build_trainer, step)


def test_a_checkpoint_of_another_run_is_refused(trainer, build_trainer, step):
    for option in ("--width=2", "--lr=0.1", "--seed=1"):
        assert "{'width': 1, 'lr': 0.004, 'seed': 0}" in refused(build_trainer, step, option)


def test_no_code_in_a_checkpoint_is_run(trainer, build_trainer, step, path):
    torch.save({"CONFIG": trainer.config, "EPOCHS_RUN": Pickled()}, path)
    assert "Weights only load failed" in refused(build_trainer, step)
    assert not os.path.exists("executed")
    torch.load(path, weights_only=False)
    assert os.path.exists("executed"), "the file was harmless"


# ---------------------------------------------------------------- saving


def test_it_saves_every_so_many_epochs_and_after_the_last(build_trainer, step, tmp_path):
    trainer, saves = build_trainer(step), []
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda: saves.append(trainer.epochs_run) or save()
    trainer.train(total_epochs=5, save_every=2)
    trainer.train(total_epochs=5, save_every=2)  # nothing is left to do
    assert saves == [2, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("step", ["01", "02", "04"])  # 03 saves as 02 does, and 05 as 04 does
def test_the_new_file_is_on_the_disk_before_it_replaces_the_old_one(trainer, path, monkeypatch):
    whole, calls, fsync, replace = path.read_bytes(), [], os.fsync, os.replace
    os.link("checkpoint.pt", "old")

    def watched_fsync(file):
        torch.load("checkpoint.pt.new", weights_only=True)  # nothing is left in Python's buffer
        assert os.path.samestat(os.fstat(file), os.stat("checkpoint.pt.new"))
        calls.append("fsync")
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    trainer.epochs_run += 1
    trainer._save_checkpoint()
    assert calls == ["fsync", "replace"]
    assert Path("old").read_bytes() == whole
    assert path.read_bytes() != whole


KILLED = """
            if self.epochs_run == 2 and not os.path.exists("killed"):
                os.mkdir("killed")
                file.truncate(1000)
                os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_old_checkpoint(trained, tmp_path):
    line = "            torch.save(checkpoint, file)\n"
    start = forked(edited(tmp_path, "01", (line, line + KILLED)), *FOUR_EPOCHS)
    assert run(start, tmp_path).returncode != 0
    assert (tmp_path / "checkpoint.pt.new").stat().st_size == 1000
    job = finished(start, tmp_path)
    assert resumed(job) == [1]
    assert not (tmp_path / "checkpoint.pt.new").exists()
    assert same_bits(job, trained("01", *FOUR_EPOCHS))
