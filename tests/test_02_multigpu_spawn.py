"""Step 2: several processes train one model, on a free port, and end together."""

import re
import sys

import pytest
import torch
from support.jobs import Job, finished, run
from support.results import accuracy, epochs, losses, same_bits, weights
from support.scripts import DOUBLE, LONG, SMALL, command, edited, load
from torch.nn.parallel import DistributedDataParallel as DDP


def test_learns_with_the_default_arguments(launched):
    job = launched("02")
    assert accuracy(job)[0] >= 98
    assert epochs(job) == [1, 2, 3, 4]
    assert len(job.stdout.splitlines()) == 5


@pytest.mark.everything
def test_two_copies_at_the_same_time(launched, tmp_path):
    with Job(command("02", "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        other = tmp_path / "other"
        other.mkdir()
        assert same_bits(finished(command("02", *LONG), other), launched("02", *LONG))
        assert job.process.poll() is None, job


@pytest.mark.everything
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all(tmp_path, rank):
    line = "    ddp_setup(rank, args.nprocs)\n"
    say = "    print(f'rank {rank} is {os.getpid()}', flush=True)\n"
    with Job(command(edited(tmp_path, "02", (line, line + say)), "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        pid = int(re.search(rf"rank {rank} is (\d+)", job.stdout)[1])
        (worker,) = [process for process in job.processes() if process.pid == pid]
        worker.kill()
        assert job.wait(60).returncode != 0
        job.wait_until_gone()
    assert "terminated with signal SIGKILL" in job.stderr or "Connection closed" in job.stderr, job


def test_the_saved_names_have_no_prefix(launched, process_group):
    model = load("02").build_model(4)
    saved = weights(launched("02", *LONG))
    assert saved.keys() == model.state_dict().keys()
    wrapped = DDP(model)
    assert wrapped.state_dict().keys() == {f"module.{name}" for name in saved}
    model.own_attribute = "reached through .module"
    assert not hasattr(wrapped, "own_attribute")
    assert wrapped.module.own_attribute == model.own_attribute


@pytest.mark.parametrize(("gpus", "nprocs"), [(0, 2), (3, 3)])
def test_one_process_per_gpu_or_two_on_a_cpu(monkeypatch, gpus, nprocs):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["02_multigpu_spawn.py"])
    assert load("02").parse_args().nprocs == nprocs


@pytest.mark.parametrize("nprocs", ["0", "-1", "x"])
def test_bad_nprocs(monkeypatch, capsys, nprocs):
    monkeypatch.setattr(sys, "argv", ["02_multigpu_spawn.py", f"--nprocs={nprocs}"])
    with pytest.raises(SystemExit) as stop:
        load("02").parse_args()
    assert stop.value.code == 2
    assert "error: argument --nprocs: " in capsys.readouterr().err.splitlines()[-1]


def look_inside(tmp_path, given):
    """Return (rank, number of threads, hash of the final weights) for each rank."""
    end = "    dist.barrier()"
    say = (
        "    bits = b''.join(p.numpy().tobytes() for p in model.state_dict().values())\n"
        "    bits = __import__('hashlib').sha256(bits).hexdigest()\n"
        "    print(f'rank {rank} {torch.get_num_threads()} {bits}\\n', end='', flush=True)\n"
    )
    path = edited(tmp_path, "02", (end, say + end))
    job = finished(command(path, "1", *SMALL), tmp_path, {"OMP_NUM_THREADS": given})
    return sorted(re.findall(r"^rank (\d) (\d+) (\w{64})$", job.stdout, re.MULTILINE))


def test_ranks_end_with_equal_weights_and_share_the_cores(tmp_path):
    say = "import torch; print(torch.get_num_threads())"
    available = run([sys.executable, "-c", say], tmp_path, {"OMP_NUM_THREADS": None}).stdout
    (rank_0, threads_0, bits_0), (rank_1, threads_1, bits_1) = look_inside(tmp_path, None)
    assert (rank_0, rank_1) == ("0", "1")
    assert int(threads_0) == int(threads_1) == max(1, int(available) // 2)
    assert bits_0 == bits_1


@pytest.mark.everything
def test_omp_num_threads_is_honoured(tmp_path):
    assert [threads for _, threads, _ in look_inside(tmp_path, "2")] == ["2", "2"]


@pytest.mark.parametrize("nprocs", [2, pytest.param(3, marks=pytest.mark.everything)])
def test_n_processes_follow_one_with_the_same_effective_batch(tmp_path, nprocs):
    """The printed loss agrees too: it is the loss of all ranks."""
    path = edited(tmp_path, "02", *DOUBLE)
    jobs, results = [], []
    for count, batch in ((nprocs, 64), (1, 64 * nprocs)):
        args = ("1", f"--batch-size={batch}", "--width=2", f"--checkpoint-path={count}.pt")
        jobs.append(finished(command(path, *args, nprocs=count), tmp_path))
        results.append(weights(tmp_path / f"{count}.pt"))
    many, one = results
    assert any(not torch.equal(one[name], many[name]) for name in one)
    assert max((one[name] - many[name]).abs().max() for name in one) < 1e-9
    assert losses(jobs[0]) == losses(jobs[1])


@pytest.mark.everything
def test_in_float32_too_for_one_step(tmp_path):
    results = []
    for nprocs, batch in ((2, 6471), (1, 12_942)):
        path = f"--checkpoint-path={nprocs}.pt"
        args = ("1", f"--batch-size={batch}", "--lr=1e-3", path)
        finished(command("02", *args, nprocs=nprocs), tmp_path)
        results.append(weights(tmp_path / f"{nprocs}.pt"))
    two, one = results
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-4
