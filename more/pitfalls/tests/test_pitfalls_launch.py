"""Pitfalls in launching and ending: what the broken script does; tests/ shows what step 5 does."""

import re
import socket

import pytest
from changes import IMPATIENT
from clusters import ON_A_CLUSTER, ON_TWO_NODES, TWO_BY_TWO
from patching import patched, text_of
from pretended import SHIM
from running import ONE
from support.jobs import free_port
from support.positions import BATCH
from support.results import epochs
from support.scripts import ROOT, command, edit, forked

pytestmark = pytest.mark.slow


def test_global_rank_as_device(pitfall):
    """Two nodes, which are ranks that see one GPU each, under the stand-in for CUDA."""
    env = {**SHIM, "CUDA_VISIBLE_DEVICES": "0"}
    node = ("    ddp_setup()\n", '    os.environ["LOCAL_RANK"] = "0"\n    ddp_setup()\n')
    pitfall.refused(node, IMPATIENT, env=env)


@pytest.mark.gpu
def test_collective_on_one_rank(pitfall):
    job = pitfall.refused(IMPATIENT)
    assert re.search(r"^\[rank0\]: .* in evaluate$", job.stderr, re.MULTILINE)
    waits = r"^\[rank1\]:.* (in main|Watchdog caught .*)$"  # in a barrier of gloo, or of NCCL
    assert re.search(waits, job.stderr, re.MULTILINE)


def test_fixed_port(pitfall):
    """Another process listens on the port."""
    with socket.create_server(("", 0)) as listener:
        port = ("12355", f"{listener.getsockname()[1]}")
        pitfall.refused(port, start=command, nprocs=1)


def test_old_store():
    """The batch file of step 3 gives restarts a new store."""
    step = (ROOT / "slurm" / "03_multigpu_torchrun.sbatch").read_text(encoding="utf-8")
    export = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert [export in text for text in (step, text_of("more/pitfalls/old_store"))] == [True, False]


@ON_A_CLUSTER
def test_without_srun(clone, submit):
    meet = "--rdzv-backend=c10d"
    patched(clone, "more/pitfalls/without_srun", (meet, f"{meet} --rdzv-conf=join_timeout=5"))
    job = submit("04_multinode.sbatch", *ONE, options=TWO_BY_TWO).becomes("FAILED")
    assert "RendezvousTimeoutError" in job.stdout
    assert epochs(job) == []


@ON_A_CLUSTER
def test_standalone_on_each_node(clone, submit):
    """Each node has its own checkpoint; with one, the slower node would find nothing to do."""
    patched(clone, "more/pitfalls/standalone_on_each_node")
    path = "        self.path = args.checkpoint_path\n"
    own = f"{path}        self.path += os.environ['SLURMD_NODENAME']\n"
    edit(clone / "04_multinode.py", path, own)
    job = submit("04_multinode.sbatch", *ONE, options=ON_TWO_NODES).becomes("COMPLETED")
    assert job.stdout.count("world size 1 on the CPU\n") == 2
    assert epochs(job) == [1, 1]


def test_localhost_fallback(pitfall):
    """Started as the second of two processes, as srun would without torchrun."""
    port = ('"29500"', f'"{free_port()}"')
    job = pitfall.ran(port, nprocs=0, env={"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert "world size 1 on the CPU\n" in job.stdout
    assert epochs(job) == [1]


@pytest.mark.gpu
def test_sigterm_with_workers(pitfall):
    """A shell sends SIGTERM to the rank and its workers; the rank waits for the workers to end."""
    told = (BATCH, f"            os.system('kill 0')\n            time.sleep(10)\n{BATCH}")
    job = pitfall.refused(told, nprocs=1)
    assert not (job.cwd / "checkpoint.pt").exists()


@pytest.mark.gpu
def test_no_record(pitfall):
    """It finds a file that is not a checkpoint, and torchrun does not say so."""
    (pitfall.folder / "checkpoint.pt").write_bytes(b"not a checkpoint")
    job = pitfall.refused(start=command, nprocs=1)
    _, report = job.stderr.split("Root Cause (first observed failure):")
    assert "RuntimeError: cannot load" not in report


EXIT = "    raise SystemExit(1 if interrupted"
THREADS = """\
    time.sleep(1)  # Linux lists a thread for a moment after it has ended
    names = os.popen(f"cat /proc/{os.getpid()}/task/*/comm").read()
    state = dist.is_initialized(), "gloo" in names
    os.write(1, f"(group, its threads): {state}\\n".encode())
"""


def left_at_the_end(pitfall, start=forked):
    """Return whether the group and gloo's threads are still there when the script ends."""
    job = pitfall.ran((EXIT, THREADS + EXIT), start=start)
    (state,) = set(re.findall(r"threads\): \((\w+), (\w+)\)", job.stdout))
    return state


def test_destroy_missing(pitfall):
    assert left_at_the_end(pitfall) == ("True", "True")


def test_handler_holds_model(pitfall):
    assert left_at_the_end(pitfall) == ("False", "True")


def test_late_import(pitfall):
    """Under torchrun: forked ranks have imported the module in time."""
    assert left_at_the_end(pitfall, start=command) == ("False", "True")
