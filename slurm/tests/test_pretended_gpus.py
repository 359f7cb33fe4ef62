"""What the scripts do with GPUs, shown by a stand-in for CUDA on a CPU."""

import json
import re

import pytest
from pretended import SHIM
from support.jobs import finished, run
from support.positions import TOLD, at
from support.results import accuracy, said, same_bits
from support.scripts import (
    LONG,
    ON_PATH,
    SMALL,
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
