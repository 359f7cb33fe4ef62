"""Pitfalls in launching and ending: only the broken script shows the symptom."""

import re
import signal
import sys

import pytest
from pretended import SHIM
from support.jobs import Job, finished, free_port, run
from support.positions import BATCH
from support.results import epochs
from support.scripts import (
    ON_PATH,
    ROOT,
    SMALL,
    TORCHRUN,
    command,
    edit,
    edited,
    forked,
    on_screen,
    patched,
)
from clusters import ON_A_CLUSTER, TWO_BY_TWO
from tracing import look_until, may_trace

SLOW = pytest.mark.slow
ONE = ("1", *SMALL)


# ---------------------------------------------------------------- launching


@SLOW
def test_global_rank_as_device(tmp_path):
    """Two agents with two processes each, as on two nodes, under the stand-in for CUDA."""
    script = patched(tmp_path, "pitfalls/global_rank_as_device")
    words = [TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=localhost:{free_port()}", script, *ONE]
    with Job(words, tmp_path, SHIM) as one, Job(words, tmp_path, SHIM) as other:
        jobs = [one, other]
        one.wait_for(lambda: any(job.process.poll() is not None for job in jobs))
        (failed,) = [job for job in jobs if job.process.poll() is not None]
        (error,) = on_screen("pitfalls/global_rank_as_device")
        assert error in failed.stderr
        found = re.findall(r"rank +: (\d) \(local_rank: (\d)\)", failed.stderr)
        assert set(found) <= {("2", "0"), ("3", "1")}
        assert found
        (waiting,) = [job for job in jobs if job is not failed]
        assert error not in waiting.stderr


@SLOW
@pytest.mark.skipif(not may_trace(), reason="py-spy needs: sudo sysctl kernel.yama.ptrace_scope=0")
def test_collective_on_one_rank(tmp_path):
    short = ("timedelta(minutes=5)", "timedelta(seconds=15)")
    script = patched(tmp_path, "pitfalls/collective_on_one_rank", short)
    with Job(command(script, *ONE), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        zero, one = (job.workers()[rank].pid for rank in (0, 1))
        here = rf"^0 +\S+ +{zero} +{script.name}:\d+ evaluate .*\n"
        here += rf"1 +\S+ +{one} +{script.name}:\d+ main "
        where = [sys.executable, ROOT / "slurm" / "where.py"]
        right = re.compile(here, re.MULTILINE).search
        look_until(right, lambda: finished(where, tmp_path, ON_PATH).stdout)
        assert job.wait().returncode == 1
    (error,) = on_screen("pitfalls/collective_on_one_rank")
    assert error in job.stderr
    assert "accuracy" not in job.stdout


@pytest.mark.weekly
def test_fixed_port(tmp_path):
    """Two copies run at the same time."""
    port = ("12355", f"{free_port()}")
    end = "    dist.destroy_process_group()\n"
    path = patched(tmp_path, "pitfalls/fixed_port", port, (end, f"    time.sleep(99)\n{end}"))
    start = command(path, *ONE)
    with Job(start, tmp_path) as job:
        job.wait_for("^epoch 1 ")
        other = tmp_path / "other"
        other.mkdir()
        failed = run(start, other)
        assert job.process.poll() is None, job
    assert failed.returncode == 1
    assert all(text in failed.stderr for text in on_screen("pitfalls/fixed_port"))


@pytest.mark.weekly  # up to eight restarts, since it is random
def test_old_store(tmp_path):
    """It is random: three restarts out of four fail."""
    join = "init_process_group(backend"
    short = (join, f"{join}, timeout=__import__('datetime').timedelta(seconds=10)")
    line = "        self.model.train()\n"
    first_life = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    kill = f"""\
        if {first_life} and dist.get_rank() == 1:
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
"""
    script = patched(tmp_path, "pitfalls/old_store", short, (line, kill + line))
    start = command(script, *ONE, torchrun=("--max-restarts=1",))
    (error,) = on_screen("pitfalls/old_store")
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        job = run(start, folder)
        if job.returncode:
            break
    assert (folder / "killed").exists()  # the first attempt worked until the kill
    assert job.returncode == 1
    assert error in job.stderr


@SLOW
@ON_A_CLUSTER
def test_without_srun(clone, submit):
    meet = "--rdzv-backend=c10d"
    patched(clone, "pitfalls/without_srun", (meet, f"{meet} --rdzv-conf=join_timeout=5"))
    job = submit("04_multinode.sbatch", *ONE, options=TWO_BY_TWO)
    assert job.wait() == "FAILED"
    (error,) = on_screen("pitfalls/without_srun")
    assert error in job.output
    assert job.epochs() == []


@SLOW
@ON_A_CLUSTER
def test_standalone_on_each_node(clone, submit):
    """Each node has its own checkpoint; with one, the slower node would find nothing to do."""
    patched(clone, "pitfalls/standalone_on_each_node")
    path = "        self.path = args.checkpoint_path\n"
    own = f"{path}        self.path += os.environ['SLURMD_NODENAME']\n"
    edit(clone / "04_multinode.py", path, own)
    train = "    trainer.train("
    say = "    print(f'of {dist.get_world_size()} ranks\\n', end='', flush=True)\n"
    edit(clone / "04_multinode.py", train, f"{say}{train}")
    job = submit("04_multinode.sbatch", *ONE, options=TWO_BY_TWO).completed()
    assert re.findall(r"^of (\d) ranks$", job.output, re.MULTILINE) == ["2"] * 4
    assert job.epochs() == [1, 1]


@SLOW
def test_localhost_fallback(tmp_path):
    """Started as the second of two processes, as srun would without torchrun."""
    train = "    trainer.train("
    say = "    print(f'rank {dist.get_rank()} of {dist.get_world_size()}', flush=True)\n"
    port = ('"29500"', f'"{free_port()}"')
    (tmp_path / "step").mkdir()
    scripts = [
        patched(tmp_path, "pitfalls/localhost_fallback", (train, say + train), port),
        edited(tmp_path / "step", "05", (train, say + train)),
    ]
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    broken, step = (run([sys.executable, path, *ONE], path.parent, env) for path in scripts)
    assert broken.returncode == 0, broken
    assert "rank 0 of 1\n" in broken.stdout
    assert epochs(broken) == [1]
    assert step.returncode == 1
    assert "environment variable RANK expected, but not set" in step.stderr


# ---------------------------------------------------------------- told to stop


@SLOW
def test_sigterm_with_workers(tmp_path):
    """The ranks wait mid-epoch until they are told to stop, and then for their workers to end."""
    library = ("import time\n", "import time\n\nimport psutil\n")
    alive = "any(worker.status() != 'zombie' for worker in psutil.Process().children())"
    gate = f"""\
            if step == 5:
                Path(f"waiting{{dist.get_rank()}}").touch()
                while not told_to_stop:
                    time.sleep(0.01)
                while {alive}:
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


# ---------------------------------------------------------------- ending


@SLOW
def test_os_exit(tmp_path):
    """Each rank has written to a file that it did not close."""
    line = "    ddp_setup()\n"
    log = "    file = open(f'log{dist.get_rank()}.txt', 'w')\n    file.write('in a buffer')\n"
    script = patched(tmp_path, "pitfalls/os_exit", (line, line + log))
    assert epochs(finished(forked(script, *ONE), tmp_path)) == [1]
    assert [(tmp_path / f"log{n}.txt").read_text(encoding="utf-8") for n in (0, 1)] == ["", ""]


# ---------------------------------------------------------------- what is printed


@pytest.mark.slow
def test_no_record(tmp_path):
    """Both scripts find a file that is not a checkpoint."""
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    scripts = [patched(tmp_path, "pitfalls/no_record"), "05"]
    reports = [run(command(path, *ONE, nprocs=1), tmp_path).stderr for path in scripts]
    reports = [text.split("Root Cause (first observed failure):")[1] for text in reports]
    (text,) = on_screen("pitfalls/no_record")
    assert [text in report for report in reports] == [True, False]
    assert ["RuntimeError: cannot load" in report for report in reports] == [False, True]
