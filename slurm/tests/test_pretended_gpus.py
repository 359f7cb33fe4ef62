"""What the scripts do with GPUs, shown by a stand-in for CUDA on a CPU."""

import json
import re
import sys

import pytest
from pretended import SHIM
from support.jobs import Job, finished, free_port, run
from support.positions import TOLD, at
from support.results import accuracy, said, same_bits
from support.scripts import (
    LONG,
    ON_PATH,
    SCRIPT,
    SMALL,
    TORCHRUN,
    command,
    edited,
    forked,
    on_each_rank,
)

pytestmark = pytest.mark.slow
TRAINED = "    trainer.train(args.total_epochs, args.save_every)\n"


def calls(job):
    """Return the calls that the shim recorded in each process of a job."""
    files = sorted((job.cwd / ".calls").glob("*"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


VOTE = {("all_reduce", "cpu")}
OBJECTS = {("all_gather", "cpu"), ("gather", "cpu")}
ON_THE_CPU = {"02": set(), "03": set(), "04": VOTE, "05": VOTE | OBJECTS}


def check_calls(job, step, ranks=2):
    """Check the first calls, the GPU of each process, and the device of each collective."""
    backend = "nccl" if step in ("02", "03") else "cpu:gloo,cuda:nccl"
    assert len(calls(job)) == ranks
    for first, second, *rest in calls(job):
        _, _, _, local_rank, gpu = second
        assert first[:2] == ["set_device", local_rank]
        assert second[:2] == ["init_process_group", backend]
        assert gpu == f"cuda:{local_rank}"
        needed = {("allocate", gpu), ("pin_memory", gpu), ("DDP", "cuda"), ("all_reduce", "cuda")}
        barriers = {("barrier", "cpu"), ("barrier", "cuda")}
        assert {*map(tuple, rest)} - barriers == needed | ON_THE_CPU[step]


@pytest.mark.parametrize("step", ["02", "03", "05"])
def test_each_rank_uses_its_own_gpu_and_nothing_warns(tmp_path, trained, step):
    start = command(step, *LONG) if step == "02" else forked(step, *LONG)
    job = finished(start, tmp_path, SHIM)
    assert not re.search("warning", job.stderr, re.IGNORECASE), job
    assert same_bits(job, trained("03", *LONG))
    assert accuracy(job)[2] == 359
    check_calls(job, step)


def test_told_to_stop_it_resumes_on_gpus(tmp_path, trained):
    start = forked(edited(tmp_path, "04", at(1, 3, TOLD)), *LONG)
    assert (run(start, tmp_path, SHIM).cwd / "checkpoint.pt.interrupted").exists()
    job = finished(forked("04", *LONG), tmp_path, SHIM)
    assert same_bits(job, trained("03", *LONG))
    check_calls(job, "04", ranks=4)


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
    ranks = [second[2] for job in (zero, one) for _, second, *_ in calls(job)]
    assert sorted(ranks) == [0, 1, 2, 3]


def test_more_processes_than_gpus(tmp_path):
    """torchrun's report ends with PyTorch's error, whose words the shim repeats."""
    job = run(command("03", nprocs=2), tmp_path, SHIM | {"CUDA_VISIBLE_DEVICES": "0"})
    assert job.returncode == 1
    lines = [line.strip() for line in job.stderr.splitlines()]
    error, advice = [line for line in lines if line.strip("=")][-2:]
    assert error.endswith("Error: CUDA error: invalid device ordinal")
    assert advice == "GPU device may be out of range, do you have enough GPUs?"


@pytest.mark.parametrize(
    ("start", "device", "ranks"),
    [
        ("CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2", "cpu", 2),
        ("torchrun --standalone --nproc-per-node=gpu", "cuda", 1),
    ],
)
def test_what_to_type_with_one_gpu(tmp_path, start, device, ranks):
    say = on_each_rank("device.type, dist.get_world_size()")
    path = edited(tmp_path, "03", (TRAINED, f"{TRAINED}    {say}"))
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
    assert "barrier(): using the device under current context" in job.stderr  # no device_id
