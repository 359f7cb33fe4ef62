"""Step 2: several processes train one network, on a port of their own, and end together."""

import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import (
    LONG,
    SMALL,
    Job,
    accuracy,
    command,
    edited,
    epochs,
    finished,
    free_port,
    load,
    run,
    same_bits,
    weights,
)
from torch.nn.parallel import DistributedDataParallel as DDP


def test_learns_with_the_default_arguments(trained):
    job = trained("02")
    assert accuracy(job)[0] >= 98
    assert epochs(job) == [1, 2, 3, 4]
    assert all("rank 0's loss" in line for line in job.stdout.splitlines()[:-1])


def test_two_at_the_same_time_one_of_them_on_a_port_of_our_choice(trained, tmp_path):
    port = free_port()

    def listening():
        with socket.socket() as client:
            return client.connect_ex(("localhost", port)) == 0

    with (
        ThreadPoolExecutor() as pool,
        Job(command("02", *LONG), tmp_path, {"MASTER_PORT": str(port)}) as job,
    ):
        other = pool.submit(trained, "02", *LONG)
        job.wait_for(listening)
        assert job.wait().returncode == 0, job
        job.wait_until_gone()
    assert same_bits(job, other.result())


def test_a_port_that_is_taken_is_an_error(tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        job = run(command("02", "1", *SMALL), tmp_path, {"MASTER_PORT": port})
    assert job.returncode != 0
    assert port in job.stderr
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.everything
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all(tmp_path, rank):
    name = ("    ddp_setup(rank, world_size)\n", "    ddp_setup(rank, world_size)\n    NAME\n")
    name = (name[0], name[1].replace("NAME", "print(f'rank {rank} is {os.getpid()}', flush=True)"))
    with Job(command(edited(tmp_path, "02", name), "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        pid = int(re.search(rf"rank {rank} is (\d+)", job.stdout)[1])
        (worker,) = [process for process in job.processes() if process.pid == pid]
        worker.kill()
        assert job.wait(60).returncode != 0
        job.wait_until_gone()
    assert "terminated with signal SIGKILL" in job.stderr or "Connection closed" in job.stderr, job


def test_the_saved_file_has_no_prefix(trained, process_group):
    model = load("02").DigitReader(4)
    saved = weights(trained("02", *LONG))
    assert saved.keys() == model.state_dict().keys()
    wrapped = DDP(model)
    assert wrapped.state_dict().keys() == {f"module.{name}" for name in saved}
    model.own_attribute = "reached through .module"
    assert not hasattr(wrapped, "own_attribute")
    assert wrapped.module.own_attribute == model.own_attribute


def test_more_processes_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = load("02")
    monkeypatch.setattr(sys, "argv", ["02_multigpu_spawn.py", "--nprocs=3"])
    with pytest.raises(SystemExit) as stop:
        module.parse_args()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "at most one per GPU (2), not 3" in line
    monkeypatch.setattr(sys, "argv", ["02_multigpu_spawn.py"])
    assert module.parse_args().nprocs == 2


@pytest.mark.parametrize("nprocs", ["0", "-1", "x"])
def test_bad_nprocs(monkeypatch, capsys, nprocs):
    monkeypatch.setattr(sys, "argv", ["02_multigpu_spawn.py", f"--nprocs={nprocs}"])
    with pytest.raises(SystemExit) as stop:
        load("02").parse_args()
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def look_inside(tmp_path, given):
    """Return the threads and the final weights of each rank, as `rank threads hash`."""
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


DOUBLE = [  # in single precision, AdamW makes steps of rounding errors: see the README
    ("scans.float()", "scans.double()"),
    ("    torch.manual_seed", "    torch.set_default_dtype(torch.float64)\n    torch.manual_seed"),
]


def test_two_processes_follow_one_with_the_same_effective_batch(tmp_path):
    path = edited(tmp_path, "02", *DOUBLE)
    results = []
    for nprocs, batch in ((2, 32), (1, 64)):
        args = ("1", f"--batch-size={batch}", "--width=2", f"--checkpoint-path={nprocs}.pt")
        finished(command(path, *args, nprocs=nprocs), tmp_path)
        results.append(weights(tmp_path / f"{nprocs}.pt"))
    two, one = results
    assert any(not torch.equal(one[name], two[name]) for name in one)
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-9


@pytest.mark.everything
def test_in_float32_too_for_one_step(tmp_path):
    results = []
    for nprocs, batch in ((2, 6471), (1, 12_942)):
        args = ("1", f"--batch-size={batch}", f"--checkpoint-path={nprocs}.pt")
        finished(command("02", *args, nprocs=nprocs), tmp_path)
        results.append(weights(tmp_path / f"{nprocs}.pt"))
    two, one = results
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-4
