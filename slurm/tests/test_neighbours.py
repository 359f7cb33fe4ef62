"""Jobs that share a cluster with others: what they leave alone, and when they end."""

import contextlib
import os
import re
import subprocess

import pytest
from clusters import (
    BATCH,
    ON_A_CLUSTER,
    ON_NODE_1,
    ONE_CLUSTER,
    TWO_BY_TWO,
    found,
    in_the_guide,
)
from practice.cluster import Cluster
from support.jobs import environment
from support.scripts import ROOT, edit

SLOW = pytest.mark.slow
pytestmark = [ON_A_CLUSTER, ONE_CLUSTER]

# ---------------------------------------------------------------- requeued, or not

LEAVES_IT = """\
if "SLURM_RESTART_COUNT" in os.environ:
    open(f"{sys.argv[1].partition('=')[2]}.interrupted", "x").close()
if told:
"""


def is_requeued(job):
    """Tell a job to stop; it is requeued, and then it goes on to its end."""
    job.cancel("--signal=TERM")
    job.becomes("PENDING")
    (job.folder / "go").touch()
    assert job.becomes("COMPLETED").show("Restarts") == "1"


@SLOW
def test_a_train_py_of_your_own(clone, simple):
    """It is requeued when it has failed and left the file, and not when it has succeeded."""
    edit(clone / BATCH["04"], *in_the_guide(r"^```diff\n-(.*\n)\+(.*\n)```"))
    options = (*ON_NODE_1, "--job-name=own")
    job = simple("04", *options, go=False, change=("if told:\n", LEAVES_IT), name="train.py")
    is_requeued(job)
    assert (clone / "own.pt.interrupted").exists()


@SLOW
def test_srun_alone(alone, simple):
    """It finds what torchrun would set, saves and requeues itself in the same way."""
    job = simple(alone, *TWO_BY_TWO, go=False)
    job.wait_for(lambda: found(job) == ["4 1 0,1"] * 4)
    is_requeued(job)
    assert found(job) == ["4 1 0,1"] * 8
    assert not job.interrupted


@SLOW
def test_a_chain_and_a_cancelled_job(cluster, simple):
    """Told to stop, the first ends and the second goes on; the third is not needed."""
    job = simple("04", *ON_NODE_1, "--array=1-3%1", "--output=x_%A_%a.out", go=False)
    number = job.number
    job.number = f"{number}_1"
    with contextlib.suppress(subprocess.CalledProcessError):
        job.cancel("--signal=TERM")  # Slurm 22.05 delivers it, then asks to try again later
    job.becomes("FAILED")
    job.number = f"{number}_2"
    job.wait_for(lambda: found(job))
    assert not job.interrupted
    end = in_the_guide(r"^(scancel --state=PENDING) 24$")
    cluster.run(*end.split(), number)
    job.number = f"{number}_3"
    job.becomes("CANCELLED")
    job.number = f"{number}_2"
    assert job.show("JobState") == "RUNNING"
    job.cancel()
    job.becomes("CANCELLED")
    cluster.wait_until_idle()  # by then, the batch file has ended
    assert job.interrupted
    assert job.becomes("CANCELLED").show("Restarts") == "0"


@SLOW
def test_the_answer_that_can_be_copied(clone, simple):
    """The batch file of an answer in lookup/questions.md requeues, too."""
    page = (ROOT / "lookup" / "questions.md").read_text(encoding="utf-8")
    block = re.search(r"^```bash\n(#SBATCH --signal=TERM@90\n(?s:.*?))```", page, re.MULTILINE)[1]
    block = block.replace("torchrun … train.py", "torchrun --standalone train.py")
    text = f"#!/bin/bash\n#SBATCH --output=%x_%j.out\n{block}"
    text = text.replace("path=", "source .venv/bin/activate\npath=", 1)
    (clone / "answer.sbatch").write_text(text, encoding="utf-8")
    is_requeued(simple("answer.sbatch", "--time=30", go=False, name="train.py"))


CRASHES = """\
import os, signal, sys, time, torch
path = sys.argv[1].partition("=")[2]

def stop(number, frame):
    torch.save({"epoch": 3, "weights": torch.rand(9)}, path)
    open(f"{path}.interrupted", "w").close()
    sys.exit(1)

if os.environ["RANK"] == "1":
    while not os.path.exists("ready"):
        time.sleep(0.05)
    os.remove("ready")
    sys.exit("rank 1 has crashed")
signal.signal(signal.SIGTERM, stop)
open("ready", "w").close()
time.sleep(600)
"""


@SLOW
def test_a_rank_that_crashes_does_not_requeue_for_ever(clone, submit):
    """The other rank saves and leaves the file, each time at the same epoch."""
    (clone / "04_multinode.py").write_text(CRASHES, encoding="utf-8")
    job = submit("04", options=(*ON_NODE_1, "--gpus-per-node=2"))
    assert job.becomes("FAILED").show("Restarts") == "1"
    said = "not requeued: 04_multinode.pt is no further than when this start began"
    assert job.stdout.count(said) == 1
    assert job.interrupted


@SLOW
def test_the_number_of_requeues_has_a_limit(clone, simple):
    edit(clone / BATCH["04"], "max_requeues=20", "max_requeues=1")
    job = simple("04", *ON_NODE_1, go=False)
    job.cancel("--signal=TERM")
    job.wait_for(lambda: len(found(job)) == 2)
    job.cancel("--signal=TERM")
    assert "not requeued: the job was restarted 1 times" in job.becomes("FAILED").stdout


@SLOW
def test_two_jobs_of_one_name_run_one_after_the_other(clone, simple, submit):
    """Also when the first is requeued in between."""
    first = simple("04", *ON_NODE_1, go=False)
    second = submit("04", options=ON_NODE_1)
    first.cancel("--signal=TERM")
    first.wait_for(lambda: len(found(first)) == 2)
    assert (second.show("JobState"), second.show("Reason")) == ("PENDING", "Dependency")
    (clone / "go").touch()
    second.becomes("COMPLETED")
    assert first.becomes("COMPLETED").show("Restarts") == "1"


@pytest.fixture
def partition(cluster):
    """Return a function that changes the partition `gpu`, until the end of the test."""

    def change(*settings):
        cluster.run("scontrol", "update", "PartitionName=gpu", *settings)

    yield change
    change("GraceTime=60", "PreemptMode=REQUEUE")


AGAIN = pytest.mark.weekly("requeued with a grace time, as it is without")


@SLOW
@pytest.mark.parametrize(
    ("grace", "mode"),
    [(0, "REQUEUE"), pytest.param(60, "REQUEUE", marks=AGAIN), (0, "CANCEL"), (60, "CANCEL")],
)
def test_preempted(cluster, partition, clone, simple, grace, mode):
    """A job of higher priority takes its node. It saves, and starts again when that has ended.

    When Slurm cancels it without a grace time, nothing is left to requeue it.
    """
    partition(f"GraceTime={grace}", f"PreemptMode={mode}")
    job = simple("04", *ON_NODE_1, go=False)
    taker = "--partition=urgent", "--nodelist=node1", "--exclusive", "--output=/dev/null"
    cluster.run("sbatch", *taker, "--wrap=sleep 5")
    job.wait_for(job.checkpoint.exists)
    (clone / "go").touch()
    ends = "PREEMPTED" if (mode, grace) == ("CANCEL", 0) else "COMPLETED"
    assert job.becomes(ends).show("Restarts") == str(int(ends == "COMPLETED"))


# ---------------------------------------------------------------- beside other jobs


@SLOW
def test_a_signal_reaches_one_job_only(cluster, clone, simple):
    """where.py sends it to the ranks of a job, and not to those of another on the same node."""
    one, two = (simple("04", *ON_NODE_1, f"--job-name={name}", go=False) for name in ("a", "b"))
    command = in_the_guide(r"^(python .*where.py 24 --signal.*)$").replace("24", str(one.number))
    cluster.run("bash", "-c", f"source .venv/bin/activate; {command}", cwd=clone)
    assert "Signal 6 (SIGABRT)" in one.becomes("FAILED").stdout
    (clone / "go").touch()
    assert two.becomes("COMPLETED").stdout.count("finds") == 1


@SLOW
def test_cpus_follow_gpus(simple):
    """Half of the GPUs, half of the CPUs."""
    job = simple("04", "--nodes=1", "--gpus-per-node=a100:2")
    assert job.becomes("COMPLETED").show("NumCPUs") == "36"


class WithAffinity(Cluster):
    """A cluster that binds tasks to CPUs, of which its nodes have as many as this machine."""

    def _write_files(self):
        super()._write_files()
        for change in (
            ("TaskPlugin=task/none", "TaskPlugin=task/affinity"),
            ("CPUs=256 RealMemory=100000", f"CPUs={os.cpu_count()} RealMemory=1000"),
            ("SlurmdParameters=config_overrides", ""),
        ):
            edit(self.folder / "slurm.conf", *change)


@SLOW
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_task_may_use_all_cpus_of_its_gpus(tmp_path, clone):
    (tmp_path / "own").mkdir()
    with WithAffinity(tmp_path / "own", environment=environment()) as cluster:
        shows = "python -c 'import os; print(len(os.sched_getaffinity(0)))'"
        edit(clone / BATCH["01"], "python 01_single_gpu.py", shows)
        options = "--gpus-per-node=2", "--cpus-per-gpu=1"
        cluster.run("sbatch", "--wait", *options, BATCH["01"], cwd=clone)
    (output,) = clone.glob("*.out")
    assert output.read_text(encoding="utf-8") == "2\n"


# ---------------------------------------------------------------- said once for a site


@SLOW
def test_what_is_said_once_for_a_site(cluster, clone, simple, monkeypatch):
    """Slurm reads its part from the environment, and all batch files source one file."""
    shown = in_the_guide(r"^```bash\n(export SBATCH(?s:.*?))```")
    for name, value in re.findall(r"(SBATCH_\w+)=(\S+)", shown):
        monkeypatch.setitem(cluster.environment, name, value)
    monkeypatch.setitem(cluster.environment, "SBATCH_PARTITION", "urgent")
    append = re.search(r"^cat >> .*?^END\n", shown, re.M | re.S)[0].replace("module load", "true")
    cluster.run("bash", "-c", append, cwd=clone)
    says = 'told = []\nos.write(1, os.environ["NCCL_SOCKET_IFNAME"].encode() + b" is set\\n")'
    job = simple("04", "--nodes=2", "--gpus-per-node=1", change=("told = []", says))
    assert job.becomes("COMPLETED").stdout.count("ib0 is set\n") == 2
    assert (job.show("Partition"), job.show("Account")) == ("urgent", "project")


@SLOW
def test_where_sbatch_exports_nothing(simple):
    job = simple("04", "--export=NONE", "--nodes=2", "--gpus-per-node=1")
    assert len(found(job.becomes("COMPLETED"))) == 2


# ---------------------------------------------------------------- the end


@SLOW
def test_the_rank_that_ends_last(alone, clone, submit):
    """srun waits SLURM_WAIT seconds for the others of the first task that has ended."""
    late = "import os, time; time.sleep(8 * (os.environ['RANK'] == '0')); print('uploaded')"
    (clone / "04_multinode.py").write_text(late, encoding="utf-8")
    for before, after, ends in ((300, 2, "FAILED"), (2, 60, "COMPLETED")):
        edit(clone / alone, f"SLURM_WAIT={before}", f"SLURM_WAIT={after}")
        job = submit(alone, options=("--nodes=2", "--gpus-per-node=1")).becomes(ends)
        assert job.stdout.count("uploaded") == (1 if after == 2 else 2)
