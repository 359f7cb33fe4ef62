"""The scripts on GPUs over NCCL and, without a GPU, under a shim that runs their GPU branches."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from support.gpus import GPUS, ON_GPUS, SHIM
from support.jobs import RESTARTS, Job, finished, free_port, run
from support.positions import KILLED, TOLD, at
from support.results import accuracy, check_report, epochs, resumed, said, same_bits
from support.scripts import (
    END,
    ON_PATH,
    SCRIPT,
    SMALL,
    TORCHRUN,
    command,
    edited,
    exact,
    forked,
    on_each_rank,
)

SHORT = ("2", *SMALL)
SLOW = pytest.mark.slow
needs_a_gpu = pytest.mark.skipif(not GPUS, reason="torch.cuda.is_available() is False")


WORLD_SIZES = range(1, max(GPUS, 1) + 1)  # all that this machine allows


def case(nprocs, *step):
    """Return the parameters of a test on `nprocs` real GPUs or, for 0, on the shim's two."""
    name, mark = (f"nccl-{nprocs}", needs_a_gpu) if nprocs else ("shim", SLOW)
    machine = SimpleNamespace(nprocs=nprocs or 2, env=ON_GPUS if nprocs else SHIM)
    machine.start = command if nprocs else forked
    machine.restart = {"torchrun": ("--max-restarts=1",)} if nprocs else {"restarts": 1}
    return pytest.param(machine, *step, id="-".join([name, *step]), marks=mark)


CASES = [case(nprocs) for nprocs in (*WORLD_SIZES, 0)]
on_gpus = pytest.mark.parametrize("machine", CASES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def machine(request):
    """The number of processes, how to start them, and the environment with that many GPUs."""
    return request.param


# ---------------------------------------------------------------- what the shim recorded


def calls(job):
    """Return the calls that the shim recorded in each process of a job; real GPUs record none."""
    files = sorted((job.cwd / ".calls").glob("*"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


VOTE = {("all_reduce", "cpu")}
OBJECTS = {("all_gather", "cpu"), ("gather", "cpu")}
ON_THE_CPU = {"02": set(), "03": set(), "04": VOTE, "05": VOTE | OBJECTS}


def check_calls(job, step):
    """Check the first calls, the GPU of each process, and the device of each collective."""
    for first, second, *rest in calls(job):
        assert (first[0], second[0]) == ("set_device", "init_process_group")
        backend, _, local_rank = second[1:]
        assert (first[1], backend) == (local_rank, "cpu:gloo,cuda:nccl")
        gpu = f"cuda:{local_rank}"
        needed = {("allocate", gpu), ("pin_memory", gpu), ("DDP", "cuda"), ("all_reduce", "cuda")}
        assert {*map(tuple, rest)} - {("barrier", "cpu")} == needed | ON_THE_CPU[step]


# ---------------------------------------------------------------- the scripts on GPUs


def no_warning(job):
    return not re.search("warning", job.stderr, re.IGNORECASE)


def deterministic(folder, step, *changes):
    """Copy a step, with deterministic algorithms; each rank also prints which GPUs it uses."""
    folder.mkdir()
    seed = "    torch.manual_seed(args.seed)\n"
    settings = "    torch.use_deterministic_algorithms(True)\n"
    settings += "    torch.backends.cudnn.benchmark = False\n"
    gpus = "[n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)]"
    say = f"    {on_each_rank(gpus)}"
    return edited(folder, step, (seed, settings + seed), (END, say + END), *changes)


def each_rank_occupies_its_own_gpu(job, nprocs):
    return [said(job, rank) for rank in range(nprocs)] == [[f"[{rank}]"] for rank in range(nprocs)]


@pytest.fixture(scope="module")
def undisturbed(machine, tmp_path_factory):
    """Run step 2 with deterministic algorithms."""
    folder = tmp_path_factory.mktemp("step02")
    path = deterministic(folder / ".script", "02", *exact(machine.nprocs))
    job = finished(command(path, *SHORT, nprocs=machine.nprocs), folder, machine.env)
    assert each_rank_occupies_its_own_gpu(job, machine.nprocs), job
    assert no_warning(job), job
    check_calls(job, "02")
    return job


LEARNS = [case(nprocs, step) for nprocs in WORLD_SIZES for step in ON_THE_CPU]


@pytest.mark.parametrize(("machine", "step"), [*LEARNS, case(0, "05")], indirect=["machine"])
def test_learns(machine, tmp_path, step):
    batch = f"--batch-size={256 // machine.nprocs}"  # the same effective batch everywhere
    job = finished(machine.start(step, batch, nprocs=machine.nprocs), tmp_path, machine.env)
    assert accuracy(job)[0] >= 98
    assert epochs(job) == [1, 2, 3, 4]
    assert job.stdout.count("accuracy ") == 1 + (step == "05")  # the class report has one too
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["checkpoint.pt"]
    assert no_warning(job), job
    check_calls(job, step)
    if step == "05":
        check_report(job)


@pytest.mark.weekly
@on_gpus
def test_killed_and_restarted(machine, undisturbed, tmp_path):
    killed = at(1, 1, KILLED, f"dist.get_rank() == {machine.nprocs - 1}")
    path = deterministic(tmp_path / "script", "03", killed, *exact(machine.nprocs))
    start = machine.start(path, *SHORT, nprocs=machine.nprocs, **machine.restart)
    job = finished(start, tmp_path, machine.env | RESTARTS)
    assert resumed(job) == [1]
    assert epochs(job) == [1, 2]
    assert each_rank_occupies_its_own_gpu(job, machine.nprocs), job
    assert same_bits(job, undisturbed)
    check_calls(job, "03")


@pytest.mark.weekly
@on_gpus
def test_told_to_stop_and_resumed_in_mid_epoch(machine, undisturbed, tmp_path):
    step = 64 * machine.nprocs  # samples
    told = at(1, 3, TOLD, f"dist.get_rank() == {machine.nprocs - 1}")
    path = deterministic(tmp_path / "script", "04", told, *exact(machine.nprocs))
    start = machine.start(path, *SHORT, nprocs=machine.nprocs)
    first = run(start, tmp_path, machine.env)
    assert (tmp_path / "checkpoint.pt.interrupted").exists(), first
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["EPOCHS_RUN"] == 1
    assert checkpoint["SAMPLES_RUN"] == 10 * step  # the ranks ask each other at every tenth step
    second = finished(start, tmp_path, machine.env)
    assert epochs(first) + epochs(second) == [1, 2]
    assert each_rank_occupies_its_own_gpu(second, machine.nprocs), second
    assert no_warning(second), second
    assert same_bits(second, undisturbed)
    check_calls(second, "04")


# ---------------------------------------------------------------- what needs no GPU


@SLOW
def test_each_node_uses_its_gpus_from_0_on(tmp_path):
    """Two agents with two processes each, as on two nodes."""
    words = [TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=localhost:{free_port()}", SCRIPT["04"], "1", *SMALL]
    words += [f"--checkpoint-path={tmp_path / 'checkpoint.pt'}"]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    with Job(words, folders[0], SHIM) as zero, Job(words, folders[1], SHIM) as one:
        assert [zero.wait().returncode, one.wait().returncode] == [0, 0], (zero, one)
    for job in (zero, one):
        check_calls(job, "04")
        gpus = sorted(first for first, *_ in calls(job))
        assert gpus == [["set_device", 0, "0"], ["set_device", 1, "1"]]
    ranks = [rank for job in (zero, one) for _, (_, _, rank, _), *_ in calls(job)]
    assert sorted(ranks) == [0, 1, 2, 3]


@SLOW
def test_more_processes_than_gpus(tmp_path):
    """torchrun's report ends with PyTorch's error, whose words the shim repeats."""
    job = run(command("03", nprocs=2), tmp_path, SHIM | {"CUDA_VISIBLE_DEVICES": "0"})
    assert job.returncode == 1
    lines = [line.strip() for line in job.stderr.splitlines()]
    error, advice = [line for line in lines if line.strip("=")][-2:]
    assert error.endswith("Error: CUDA error: invalid device ordinal")
    assert advice == "GPU device may be out of range, do you have enough GPUs?"


@SLOW
@pytest.mark.parametrize(
    ("step", "start", "device", "ranks"),
    [
        pytest.param("02", "CUDA_VISIBLE_DEVICES= python", "cpu", 2, marks=pytest.mark.weekly),
        ("03", "CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2", "cpu", 2),
        ("03", "torchrun --standalone --nproc-per-node=gpu", "cuda", 1),
    ],
)
def test_what_to_type_with_one_gpu(tmp_path, step, start, device, ranks):
    say = on_each_rank("device.type, dist.get_world_size()")
    path = edited(tmp_path, step, (END, f"    {say}{END}"))
    words = ["bash", "-c", f"{start} {path.name} 1 {' '.join(SMALL)}"]
    job = finished(words, tmp_path, SHIM | ON_PATH | {"CUDA_VISIBLE_DEVICES": "0"})
    said_by = [said(job, rank) for rank in range(ranks)]
    assert said_by == [[f"('{device}', {ranks})"]] * ranks


def test_the_shim_fails_where_a_gpu_would(tmp_path):
    program = """
import torch
import torch.distributed as dist

def fails(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        print(str(error).splitlines()[0])

cpu, gpu = torch.ones(2), torch.ones(2, device="cuda")
fails(torch.add, cpu, gpu)
fails(torch.cuda.set_device, 2)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(gpu)
fails(dist.all_reduce, gpu.cpu())
fails(dist.all_reduce, cpu)
print(gpu.tolist(), cpu.device, cpu.to(gpu.device).device, (gpu * 2).to(dtype=int).device)
dist.destroy_process_group()
"""
    job = finished([sys.executable, "-c", program], tmp_path, SHIM)
    assert job.stdout.splitlines() == [
        "Expected all tensors to be on the same device",
        "CUDA error: invalid device ordinal",
        "No backend type associated with device type cpu",
        "No backend type associated with device type cpu",
        "[1.0, 1.0] cpu cuda:0 cuda:0",
    ]
