"""What the scripts do with GPUs, shown by a stand-in for CUDA on a CPU."""

import json
import re

import pytest
from pretended import SHIM
from support.jobs import finished, run
from support.positions import SIGTERM, at
from support.results import same_bits
from support.scripts import SMALL, command, edited, forked

pytestmark = pytest.mark.slow
TWO = ("2", *SMALL)


@pytest.mark.parametrize("step", ["02", "03", "04", "05"])
def test_each_rank_uses_its_own_gpu_and_nothing_warns(tmp_path, trained, step):
    """Step 4 is told to stop, and resumes. A collective fails if its device has no backend."""
    if step == "04":
        run(forked(edited(tmp_path, "04", at(1, 3, SIGTERM)), *TWO), tmp_path, SHIM)
        assert (tmp_path / "checkpoint.pt.interrupted").exists()
    job = finished(command(step, *TWO) if step == "02" else forked(step, *TWO), tmp_path, SHIM)
    assert not re.search("warning", job.stderr, re.IGNORECASE), job
    assert same_bits(job, trained("03", *TWO))

    processes = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob(".calls/*")]
    assert len(processes) == (4 if step == "04" else 2)
    for first, second, *rest in processes:
        _, backend, _, local_rank, gpu = second
        assert first[:2] == ["set_device", local_rank]
        assert backend == ("nccl" if step in ("02", "03") else "cpu:gloo,cuda:nccl")
        assert gpu == f"cuda:{local_rank}"
        needed = {("allocate", gpu), ("pin_memory", gpu), ("DDP", "cuda"), ("all_reduce", "cuda")}
        assert needed <= {*map(tuple, rest)}
