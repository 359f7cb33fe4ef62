"""Pitfalls in launching and ending: only the broken script shows the symptom."""

import re
import signal
import socket

import pytest
from clusters import ON_A_CLUSTER, TWO_BY_TWO
from patching import on_screen, patched, text_of
from pretended import SHIM
from running import IMPATIENT, ONE, TRAIN
from support import server
from support.jobs import Job, finished, free_port, run
from support.positions import BATCH, KILLED, ON_RANK_1, at
from support.results import epochs
from support.scripts import ROOT, command, edit, edited, forked

pytestmark = pytest.mark.slow


def test_global_rank_as_device(tmp_path):
    """Two nodes, which are ranks that see one GPU each, under the stand-in for CUDA."""
    env = {**SHIM, "CUDA_VISIBLE_DEVICES": "0"}
    node = ("    ddp_setup()\n", '    os.environ["LOCAL_RANK"] = "0"\n    ddp_setup()\n')
    (tmp_path / "step").mkdir()
    finished(forked(edited(tmp_path / "step", "05", node), *ONE), tmp_path / "step", env)
    script = patched(tmp_path, "pitfalls/global_rank_as_device", node)
    job = run(forked(script, *ONE), tmp_path, env)
    assert job.returncode == 1
    (error,) = on_screen("pitfalls/global_rank_as_device")
    assert re.search(rf"^\[?.*{error}", job.stderr, re.MULTILINE), job


def test_collective_on_one_rank(tmp_path):
    script = patched(tmp_path, "pitfalls/collective_on_one_rank", IMPATIENT)
    job = run(forked(script, *ONE), tmp_path)
    assert job.returncode == 1
    (error,) = on_screen("pitfalls/collective_on_one_rank")
    assert error in job.stderr
    assert re.search(r"^\[rank0\]: .* in evaluate$", job.stderr, re.MULTILINE)
    assert re.search(r"^\[rank1\]: .* in main$", job.stderr, re.MULTILINE)
    assert "accuracy" not in job.stdout


def test_fixed_port(tmp_path):
    """Another process listens on the port."""
    with socket.create_server(("", 0)) as listener:
        port = ("12355", f"{listener.getsockname()[1]}")
        job = run(command(patched(tmp_path, "pitfalls/fixed_port", port), *ONE), tmp_path)
    assert job.returncode == 1
    assert all(text in job.stderr for text in on_screen("pitfalls/fixed_port"))


def test_the_batch_file_of_step_3_gives_restarts_a_new_store():
    step = (ROOT / "slurm" / "03_multigpu_torchrun.sbatch").read_text(encoding="utf-8")
    export = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert [export in text for text in (step, text_of("pitfalls/old_store"))] == [True, False]


@pytest.mark.weekly("up to eight restarts under torchrun, since it is a matter of chance")
def test_old_store(tmp_path):
    """Three restarts out of four fail."""
    join = "init_process_group(backend"
    short = (join, f"{join}, timeout=__import__('datetime').timedelta(seconds=10)")
    script = edited(tmp_path, "03", short, at(0, 20, KILLED, ON_RANK_1))
    start = command(script, *ONE, torchrun=("--max-restarts=1",))
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        job = run(start, folder)
        assert (folder / "checkpoint.pt.killed").exists()
        if job.returncode:
            break
    (error,) = on_screen("pitfalls/old_store")
    assert error in job.stderr


@ON_A_CLUSTER
def test_without_srun(clone, submit):
    meet = "--rdzv-backend=c10d"
    patched(clone, "pitfalls/without_srun", (meet, f"{meet} --rdzv-conf=join_timeout=5"))
    job = submit("04_multinode.sbatch", *ONE, options=TWO_BY_TWO)
    assert job.wait() == "FAILED"
    (error,) = on_screen("pitfalls/without_srun")
    assert error in job.output
    assert job.epochs() == []


@ON_A_CLUSTER
def test_standalone_on_each_node(clone, submit):
    """Each node has its own checkpoint; with one, the slower node would find nothing to do."""
    patched(clone, "pitfalls/standalone_on_each_node")
    path = "        self.path = args.checkpoint_path\n"
    own = f"{path}        self.path += os.environ['SLURMD_NODENAME']\n"
    edit(clone / "04_multinode.py", path, own)
    say = "    print(f'of {dist.get_world_size()} ranks\\n', end='', flush=True)\n"
    edit(clone / "04_multinode.py", TRAIN, f"{say}{TRAIN}")
    job = submit("04_multinode.sbatch", *ONE, options=TWO_BY_TWO).completed()
    assert re.findall(r"^of (\d) ranks$", job.output, re.MULTILINE) == ["2"] * 4
    assert job.epochs() == [1, 1]


def test_localhost_fallback(tmp_path):
    """Started as the second of two processes, as srun would without torchrun."""
    say = (TRAIN, f"    log(f'rank {{dist.get_rank()}} of {{dist.get_world_size()}}')\n{TRAIN}")
    port = ('"29500"', f'"{free_port()}"')
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    path = patched(tmp_path, "pitfalls/localhost_fallback", say, port)
    broken = finished(server.command(path, *ONE), tmp_path, env)
    assert "rank 0 of 1\n" in broken.stdout
    assert epochs(broken) == [1]
    step = run(server.command(edited(tmp_path, "05"), *ONE), tmp_path, env)
    assert step.returncode == 1
    assert "environment variable RANK expected, but not set" in step.stderr


def test_sigterm_with_workers(tmp_path):
    """torchrun tells all processes to stop, and the ranks wait until their workers have ended."""
    library = ("import time\n", "import time\n\nimport psutil\n")
    gate = f"""\
            if step == 5:
                open(f"waiting{{dist.get_rank()}}", "w").close()
                while any(one.status() != "zombie" for one in psutil.Process().children()):
                    time.sleep(0.01)
{BATCH}"""
    script = patched(tmp_path, "pitfalls/sigterm_with_workers", library, (BATCH, gate))
    with Job(command(script, *ONE), tmp_path) as job:
        job.wait_for(lambda: len(list(tmp_path.glob("waiting*"))) == 2)
        job.process.send_signal(signal.SIGTERM)
        job.wait().wait_until_gone()
    assert not (tmp_path / "checkpoint.pt").exists()
    (error,) = on_screen("pitfalls/sigterm_with_workers")
    assert error in job.stderr


def test_os_exit(tmp_path):
    """Each rank has written to a file that it did not close."""
    line = "    ddp_setup()\n"
    log = "    file = open(f'log{dist.get_rank()}.txt', 'w')\n    file.write('in a buffer')\n"
    script = patched(tmp_path, "pitfalls/os_exit", (line, line + log))
    assert epochs(finished(forked(script, *ONE), tmp_path)) == [1]
    assert [(tmp_path / f"log{n}.txt").read_text(encoding="utf-8") for n in (0, 1)] == ["", ""]


def test_no_record(tmp_path):
    """It finds a file that is not a checkpoint, and torchrun does not say so."""
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    job = run(command(patched(tmp_path, "pitfalls/no_record"), *ONE, nprocs=1), tmp_path)
    _, report = job.stderr.split("Root Cause (first observed failure):")
    assert on_screen("pitfalls/no_record")[0] in report
    assert "RuntimeError: cannot load" not in report
