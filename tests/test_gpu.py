"""The steps on this machine's GPUs, over NCCL; without one, a single skip says so."""

import pytest
import torch
from support.gpus import GPUS, ON_GPUS
from support.jobs import RESTARTS, finished, run
from support.positions import KILLED, TOLD, at
from support.results import accuracy, check_report, epochs, resumed, said, same_bits
from support.scripts import SMALL, command, edited, exact, on_each_rank

if not GPUS:
    reason = "no GPU here, or a PyTorch without CUDA: pip install torch (not its CPU build)"
    pytest.skip(reason, allow_module_level=True)

SHORT = ("2", *SMALL)
WORLD_SIZES = range(1, GPUS + 1)
TRAINED = "    trainer.train(args.total_epochs, args.save_every)\n"
SEED = "    torch.manual_seed(args.seed)\n"


def deterministic(folder, step, *changes):
    """Copy a step, with deterministic algorithms; each rank also prints which GPUs it uses."""
    folder.mkdir()
    settings = "    torch.use_deterministic_algorithms(True)\n"
    settings += "    torch.backends.cudnn.benchmark = False\n"
    gpus = "[n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)]"
    say = (TRAINED, f"{TRAINED}    {on_each_rank(gpus)}")
    return edited(folder, step, (SEED, settings + SEED), say, *changes)


def each_rank_occupies_its_own_gpu(job, nprocs):
    return [said(job, rank) for rank in range(nprocs)] == [[f"[{rank}]"] for rank in range(nprocs)]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def undisturbed(request, tmp_path_factory):
    """Run step 2 with deterministic algorithms; return the world size and the Result."""
    folder = tmp_path_factory.mktemp("step02")
    path = deterministic(folder / ".script", "02", *exact(request.param))
    job = finished(command(path, *SHORT, nprocs=request.param), folder, ON_GPUS)
    assert each_rank_occupies_its_own_gpu(job, request.param), job
    return request.param, job


@pytest.mark.parametrize("step", ["02", "03", "04", "05"])
@pytest.mark.parametrize("nprocs", WORLD_SIZES)
def test_it_learns_on_gpus_and_nothing_warns(tmp_path, nprocs, step):
    batch = f"--batch-size={256 // nprocs}"  # the same effective batch everywhere
    job = finished(command(step, batch, nprocs=nprocs), tmp_path, ON_GPUS)
    assert accuracy(job)[0] >= 98
    assert epochs(job) == [1, 2, 3, 4]
    assert "warning" not in job.stderr.lower(), job
    if step == "05":
        check_report(job)


def test_it_survives_a_kill_on_gpus(undisturbed, tmp_path):
    nprocs, other = undisturbed
    killed = at(1, 1, KILLED, f"dist.get_rank() == {nprocs - 1}")
    path = deterministic(tmp_path / "script", "03", killed, *exact(nprocs))
    start = command(path, *SHORT, nprocs=nprocs, torchrun=("--max-restarts=1",))
    job = finished(start, tmp_path, ON_GPUS | RESTARTS)
    assert resumed(job) == [1]
    assert each_rank_occupies_its_own_gpu(job, nprocs), job
    assert same_bits(job, other)


def test_told_to_stop_on_gpus_it_loses_no_step(undisturbed, tmp_path):
    nprocs, other = undisturbed
    told = at(1, 3, TOLD, f"dist.get_rank() == {nprocs - 1}")
    path = deterministic(tmp_path / "script", "04", told, *exact(nprocs))
    start = command(path, *SHORT, nprocs=nprocs)
    first = run(start, tmp_path, ON_GPUS)
    assert (tmp_path / "checkpoint.pt.interrupted").exists(), first
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["EPOCHS_RUN"], saved["SAMPLES_RUN"]) == (1, 10 * 64 * nprocs)
    second = finished(start, tmp_path, ON_GPUS)
    assert epochs(first) + epochs(second) == [1, 2]
    assert each_rank_occupies_its_own_gpu(second, nprocs), second
    assert same_bits(second, other)
