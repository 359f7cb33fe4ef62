"""The steps on this machine's GPUs, over NCCL: `pytest --gpus`. Several ranks may share a GPU.

On a shared GPU, they show neither which rank takes which GPU, nor the links between GPUs.
"""

import re

import pytest
import torch
from support import gpus
from support.jobs import RESTARTS, finished, run
from support.positions import KILLED, SIGTERM, at
from support.results import accuracy, epochs, printed_by, resumed, same_bits
from support.scripts import SMALL, command, edited, exact, on_each_rank

if not gpus.count():
    pytest.skip("runs on GPUs: pytest --gpus", allow_module_level=True)

pytestmark = pytest.mark.gpu
SHORT = ("2", *SMALL)
WORLD_SIZES = sorted({1, 2, 4, *range(1, gpus.count() + 1)})
TRAINED = "    trainer.train(args.total_epochs, args.save_every)\n"


def says_its_gpus(folder, step, *changes):
    """Copy a step; each rank also prints which GPUs it uses."""
    folder.mkdir(exist_ok=True)
    used = "[n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)]"
    return edited(folder, step, (TRAINED, f"{TRAINED}    {on_each_rank(used)}"), *changes)


def each_rank_used_one_gpu(job, nprocs):
    """Return whether each rank used its own GPU or, if the ranks share one, the first."""
    own = [0] * nprocs if gpus.shared(nprocs) else range(nprocs)
    return [printed_by(job, rank) for rank in range(nprocs)] == [[f"[{n}]"] for n in own]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def undisturbed(request, tmp_path_factory):
    """Run step 2 or, as its ranks share no GPU, step 3; return the world size and the Job."""
    nprocs, folder = request.param, tmp_path_factory.mktemp("undisturbed")
    step = "03" if gpus.shared(nprocs) else "02"
    path = says_its_gpus(folder / ".script", step, *exact(nprocs))
    job = finished(command(path, *SHORT, nprocs=nprocs), folder)
    assert each_rank_used_one_gpu(job, nprocs), job
    return nprocs, job


@pytest.mark.parametrize("step", ["02", "03", "04", "05"])
@pytest.mark.parametrize("nprocs", WORLD_SIZES)
def test_it_learns_on_gpus_and_nothing_warns(tmp_path, nprocs, step):
    if step == "02" and gpus.shared(nprocs):
        pytest.skip("each rank of step 2 needs a GPU of its own")
    batch = f"--batch-size={256 // nprocs}"  # the same effective batch everywhere
    job = finished(command(step, batch, nprocs=nprocs), tmp_path)
    assert accuracy(job)[0] >= 98
    assert "on the CPU" not in job.stdout
    assert epochs(job) == [1, 2, 3, 4]
    assert "warning" not in job.stderr.lower(), job
    if step == "05":
        assert re.search(r"^ +accuracy +[\d.]+ +359$", job.stdout, re.MULTILINE), job


def test_it_survives_a_kill_on_gpus(undisturbed, tmp_path):
    nprocs, other = undisturbed
    killed = at(1, 1, KILLED, f"dist.get_rank() == {nprocs - 1}")
    path = says_its_gpus(tmp_path / "script", "03", killed, *exact(nprocs))
    start = command(path, *SHORT, nprocs=nprocs, torchrun=("--max-restarts=1",))
    job = finished(start, tmp_path, RESTARTS)
    assert resumed(job) == [1]
    assert each_rank_used_one_gpu(job, nprocs), job
    assert same_bits(job, other)


def test_told_to_stop_on_gpus_it_loses_no_step(undisturbed, tmp_path):
    nprocs, other = undisturbed
    told = at(1, 3, SIGTERM, f"dist.get_rank() == {nprocs - 1}")
    path = says_its_gpus(tmp_path / "script", "04", told, *exact(nprocs))
    start = command(path, *SHORT, nprocs=nprocs)
    first = run(start, tmp_path)
    assert (tmp_path / "checkpoint.pt.interrupted").exists(), first
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (1, 10 * 64 * nprocs)
    second = finished(start, tmp_path)
    assert epochs(first) + epochs(second) == [1, 2]
    assert each_rank_used_one_gpu(second, nprocs), second
    assert same_bits(second, other)
