"""A checkpoint is whole or not there; one that is not whole, or not ours, is refused by name."""

import contextlib
import copy
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import (
    SCRIPT,
    Job,
    arguments,
    command,
    epochs,
    error_lines,
    finished,
    kill,
    load,
    run,
    same_bits,
)

EVERYTHING = pytest.mark.everything
WIDE = ("4", "--batch-size=64", "--width=16")  # its checkpoint is larger than its output


# ---------------------------------------------------------------- loading


@pytest.fixture(params=["03", "04"])  # 05 has these functions word for word from 04
def trainer(request, tmp_path, process_group, monkeypatch):
    """A trainer that has made a step and saved it as checkpoint.pt in the current folder."""
    monkeypatch.chdir(tmp_path)
    module = load(request.param)
    args = arguments("checkpoint.pt")
    train_set, _, model, optimizer = module.load_train_objs(args)
    data = module.prepare_dataloader(train_set, args)
    trainer = module.Trainer(model, data, optimizer, torch.device("cpu"), 0, args)
    trainer._run_batch(*next(iter(data)))
    trainer._save_checkpoint()
    return trainer


@pytest.fixture
def path(trainer, tmp_path):
    return tmp_path / "checkpoint.pt"


def refused(trainer, capsys):
    """See the file refused by one line that names it, and left as it is; return the line."""
    path = trainer.args.checkpoint_path
    before = os.stat(path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        trainer._load_checkpoint()
    assert stop.value.code == 2
    after = os.stat(path)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot resume from checkpoint.pt, move it away or name another: " in line
    return line


def contents(trainer):
    """Return a copy of everything that a checkpoint brings back."""
    states = trainer.model.module.state_dict(), trainer.optimizer.state_dict()
    return copy.deepcopy([*states, trainer.epochs_run, getattr(trainer, "samples_run", 0)])


def forget(trainer):
    for weights in trainer.model.parameters():
        weights.data.zero_()
    trainer.optimizer.state.clear()
    trainer.epochs_run = -1


def test_a_flipped_byte_anywhere(trainer, path, capsys, request):
    """Refused; or else it is a byte that means nothing, and all that is loaded is as it was."""
    whole, expected, meaning = path.read_bytes(), contents(trainer), set()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            start = whole.index(archive.read(member), member.header_offset)
            meaning |= set(range(start, start + member.file_size))
    accepted = set()
    for position in range(0, len(whole), 1 if request.config.getoption("--everything") else 17):
        flipped = bytearray(whole)
        flipped[position] ^= 0xFF
        path.write_bytes(flipped)
        forget(trainer)
        try:
            trainer._load_checkpoint()
        except SystemExit as stop:
            assert stop.code == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "cannot resume from checkpoint.pt" in line
        else:
            accepted.add(position)
            torch.testing.assert_close(contents(trainer), expected, rtol=0, atol=0)
        assert path.read_bytes() == flipped
    assert meaning
    assert not accepted & meaning


def test_torch_alone_would_not_notice(trainer, path, capsys):
    whole = path.read_bytes()
    tensor = trainer.model.module.state_dict()["2.weight"].numpy().tobytes()
    position = whole.index(tensor)
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    torch.load(path, weights_only=True)  # takes it without a word
    assert "is damaged" in refused(trainer, capsys)


def test_cut_at_any_length(trainer, path, capsys):
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 31), *range(len(whole) - 40, len(whole))]:
        path.write_bytes(whole[:length])
        refused(trainer, capsys)
    path.write_bytes(whole)
    trainer._load_checkpoint()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04", bytes(10_000)])
def test_no_checkpoint_at_all(trainer, path, capsys, content):
    path.write_bytes(content)
    refused(trainer, capsys)


def test_a_directory(trainer, path, capsys):
    path.unlink()
    path.mkdir()
    assert "IsADirectoryError" in refused(trainer, capsys)


@pytest.mark.parametrize(
    "change", [{"width": 2}, {"lr": 0.1}, {"seed": 1}, {"format": 99}, {"momentum": 0.9}]
)
def test_of_another_run_or_of_a_newer_format(trainer, path, capsys, change):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["CONFIG"].update(change)
    torch.save(checkpoint, path)
    ((name, value),) = change.items()
    assert f"'{name}': {value}" in refused(trainer, capsys)


def test_of_another_step(trainer, trained, path, capsys):
    """Step 1 saves weights alone; step 3 would forget in which sample of an epoch step 4 is."""
    args = ("1", "--batch-size=64", "--width=1")
    path.write_bytes((trained("01", *args).cwd / "checkpoint.pt").read_bytes())
    refused(trainer, capsys)
    other = "04" if "samples_run" not in vars(trainer) else "03"
    path.write_bytes((trained(other, *args).cwd / "checkpoint.pt").read_bytes())
    assert "'format': " in refused(trainer, capsys)


class Pickled:
    """What makes a folder when it is loaded by pickle."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_no_pickle_is_executed(trainer, path, capsys):
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "EPOCHS_RUN": Pickled()}, path)
    assert "Weights only load failed" in refused(trainer, capsys)
    assert not os.path.exists("executed")
    torch.load(path, weights_only=False)
    assert os.path.exists("executed"), "this one was harmless"
    os.rmdir("executed")
    path.write_bytes(pickle.dumps(Pickled()))
    refused(trainer, capsys)
    assert not os.path.exists("executed")


@contextlib.contextmanager
def without_privileges():
    """Root may read and write everything, so be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_unreadable(trainer, path, capsys):
    trainer._load_checkpoint()
    path.chmod(0o000)
    path.parent.chmod(0o755)
    with without_privileges():
        assert "PermissionError(13" in refused(trainer, capsys)


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("step", SCRIPT)
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys, step):
    """Known at once, before anything is trained in vain."""
    module = load(step)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [SCRIPT[step].name])
    tmp_path.chmod(0o555)
    with without_privileges(), pytest.raises(SystemExit) as stop:
        module.parse_args()
    tmp_path.chmod(0o755)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no permission or no folder to write checkpoint.pt" in line


def test_what_cannot_be_written(trainer, path, capsys):
    """Also when something is in the way of the new file only."""
    whole = path.read_bytes()
    os.mkdir("checkpoint.pt.new")
    with pytest.raises(SystemExit) as stop:
        trainer._save_checkpoint()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write checkpoint.pt: " in line
    assert path.read_bytes() == whole


def test_the_old_file_is_whole_until_the_new_one_is_safe(trainer, path, monkeypatch):
    """Renamed, not written over, and not before it is on the disk."""
    whole, calls = path.read_bytes(), []
    os.link("checkpoint.pt", "old")

    def watched(name, function):
        return lambda *args: calls.append(name) or function(*args)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    trainer.epochs_run += 1
    trainer._save_checkpoint()
    assert calls == ["fsync", "replace"]
    assert Path("old").read_bytes() == whole
    assert path.read_bytes() != whole


def on_a_full_disk(words):
    """Let none of a command's files grow beyond 64 KiB."""
    return ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *words]


@pytest.mark.parametrize(
    "step", [pytest.param(n, marks=() if n == "04" else EVERYTHING) for n in SCRIPT]
)
def test_a_full_disk(trained, tmp_path, step):
    finished(command(step, "1", *WIDE[1:]), tmp_path)
    saved = (tmp_path / "checkpoint.pt").read_bytes()
    assert len(saved) > 100_000
    job = run(on_a_full_disk(command(step, *WIDE)), tmp_path)
    assert job.returncode != 0
    (line,) = error_lines(job)
    assert "cannot write checkpoint.pt: " in line
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved
    job = finished(command(step, *WIDE), tmp_path)
    assert epochs(job) == ([1, 2, 3, 4] if step in ("01", "02") else [2, 3, 4])
    assert same_bits(job, trained(step, *WIDE))


@pytest.mark.parametrize("step", [pytest.param("03", marks=EVERYTHING), "04"])
def test_kill_9_in_the_middle_of_writing(trained, tmp_path, step):
    args = ("4", "--batch-size=256")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        new = folder / "checkpoint.pt.new"
        with Job(command(step, *args, torchrun=("--max-restarts=1",)), folder) as job:
            job.wait_for("^epoch 2 ")
            writer = job.workers()[0]
            while not new.exists() and job.process.poll() is None:
                pass  # it is there for some thousandths of a second
            kill(writer)
            writer.wait(10)
            if not new.exists():
                continue  # a moment too late: it had got its name
            assert torch.load(folder / "checkpoint.pt", weights_only=True)["EPOCHS_RUN"] < 4
            assert job.wait().returncode == 0, job
            job.wait_until_gone()
            break
    assert len(re.findall(r"checkpoint.pt: [123] of 4 epochs run", job.stdout)) == 1, job
    assert not new.exists()
    assert same_bits(job, trained("02", *args))
