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
    SIMPLE,
    TWO_BY_TWO,
    Submitted,
    found,
    in_the_guide,
    second_launcher,
)
from practice.cluster import Cluster
from support.jobs import environment
from support.scripts import ROOT, edit

SLOW = pytest.mark.slow
pytestmark = ON_A_CLUSTER

# ---------------------------------------------------------------- a script of a stranger's

LEAVES_IT = """\
if "SLURM_RESTART_COUNT" in os.environ:
    open(f"{sys.argv[-1].partition('=')[2]}.interrupted", "w").close()
if told:
"""


@pytest.fixture
def stranger(clone, submit):
    """Submit a batch file for a script `train.py` from a folder that holds nothing else."""
    folder = clone / "elsewhere"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "bin").symlink_to(clone / ".venv" / "bin")

    def submit_train(launch, script, *options):
        text = (ROOT / BATCH["04"]).read_text(encoding="utf-8")
        *gone, old, new = in_the_guide(r"^```diff\n-(.*\n)-(.*\n)-(.*\n)\+(.*\n)```")
        for line in (*gone, old):
            assert text.count(line) == 1
            text = text.replace(line, new if line == old else "")
        if launch == "srun":
            text = second_launcher(text)
        (folder / "job.sbatch").write_text(text, encoding="utf-8")
        (folder / "train.py").write_text(script, encoding="utf-8")
        return submit("job.sbatch", options=("--job-name=own", *options), folder=folder)

    return submit_train


def is_requeued(job):
    """Tell a job to stop; it is requeued, and then it goes on to its end."""
    job.cancel("--signal=TERM")
    job.becomes("PENDING")
    (job.folder / "go").touch()
    assert job.becomes("COMPLETED").show("Restarts") == "1"


@SLOW
@pytest.mark.parametrize(("launch", "rank"), [("torchrun", "RANK"), ("srun", "SLURM_PROCID")])
def test_a_train_py_of_your_own(stranger, launch, rank):
    """The file is whole without this repository; what failed and left the file is requeued."""
    script = SIMPLE.replace("WORLD_SIZE", rank).replace("if told:\n", LEAVES_IT)
    job = stranger(launch, script, *TWO_BY_TWO)
    ranks = [f"{number} 1 0,1" for number in range(4)]
    job.wait_for(lambda: found(job) == ranks)
    is_requeued(job)
    assert found(job) == sorted(ranks * 2)


@SLOW
def test_a_script_for_the_other_launcher_is_an_error(stranger):
    """Otherwise it would take the number of its node for its rank, and wait for ever."""
    job = stranger("torchrun", "import os; print(os.environ['SLURM_PROCID'])", *TWO_BY_TWO)
    assert "KeyError: 'SLURM_PROCID'" in job.becomes("FAILED").stdout
    last = r"failed with status [1-9]\d* \(see above\), not requeued: no ./own.pt.interrupted, .*"
    assert re.fullmatch(last, job.stdout.splitlines()[-1])


# ---------------------------------------------------------------- requeued, or not


@SLOW
@pytest.mark.parametrize("words", ["--checkpoint-path=far/x.pt", "--checkpoint-path far/x.pt", ""])
def test_a_checkpoint_elsewhere(clone, simple, words):
    """Its path follows the file name, in either way of typing it, or the batch file names it."""
    (clone / "far").mkdir()
    if not words:
        edit(clone / BATCH["04"], "checkpoint_dir=.", "checkpoint_dir=far")
    job = simple("04", *ON_NODE_1, "--job-name=x", go=False, arguments=words.split())
    is_requeued(job)
    assert [path.parent.name for path in clone.glob("**/*.pt")] == ["far"]


@SLOW
def test_an_array_is_a_sweep(simple):
    """Its tasks run at once, save to files of their own, and are requeued one by one."""
    array = in_the_guide(r"^sbatch (--array=\S+ --job-name=\S+) ").split()
    job = simple("04", *ON_NODE_1, *array, go=False)
    number = job.number
    outputs = lambda: "".join(path.read_text("utf-8") for path in job.folder.glob("sweep_*.out"))  # noqa: E731
    job.wait_for(lambda: outputs().count("finds") == 3)
    for task in ("1", "3"):  # the number of the last task is that of the array
        job.number = f"{number}_{task}"
        with contextlib.suppress(subprocess.CalledProcessError):
            job.cancel("--signal=TERM")  # Slurm 22.05 delivers it, then asks to try again later
        job.wait_for(lambda: job.show("Restarts") == "1")
        assert (job.folder / f"sweep_{task}.pt").exists()
    (job.folder / "go").touch()
    for task, restarts in (("1", "1"), ("2", "0"), ("3", "1")):
        job.number = f"{number}_{task}"
        assert job.becomes("COMPLETED").show("Restarts") == restarts
    assert not (job.folder / "sweep.pt").exists()


@SLOW
def test_a_chain_and_a_cancelled_job(cluster, clone, simple, submit):
    """Told to stop, the first ends and the second goes on; the third is not needed."""
    edit(clone / BATCH["04"], "max_requeues=20", "max_requeues=0")
    assert in_the_guide(r"^for i in 1 2 3; do sbatch (\S+) 50; done$") == BATCH["04"]
    jobs = [simple("04", *ON_NODE_1, go=False), *(submit("04", options=ON_NODE_1) for _ in "23")]
    jobs[0].cancel("--signal=TERM")
    assert "or 0 restarts" in jobs[0].becomes("FAILED").stdout
    jobs[1].wait_for(lambda: found(jobs[1]))
    cluster.run("bash", "-c", in_the_guide(r"^(scancel --me .*)$"))
    jobs[2].becomes("CANCELLED")
    assert jobs[1].show("JobState") == "RUNNING"
    assert not jobs[1].interrupted
    jobs[1].cancel()
    jobs[1].becomes("CANCELLED")
    cluster.wait_until_idle()  # by then, the batch file has ended
    assert jobs[1].interrupted
    assert jobs[1].show("Restarts") == "0"


@SLOW
def test_the_answer_that_can_be_copied(clone, simple):
    """The batch file of an answer in lookup/slurm.md requeues, too."""
    page = (ROOT / "lookup" / "slurm.md").read_text(encoding="utf-8")
    block = re.search(r"^```bash\n(#SBATCH --signal=TERM@90\n(?s:.*?))```", page, re.MULTILINE)[1]
    block = block.replace("torchrun … train.py", "torchrun --standalone train.py")
    text = f"#!/bin/bash\n#SBATCH --output=%x_%j.out\n{block}"
    text = text.replace("path=", "source .venv/bin/activate\npath=", 1)
    (clone / "answer.sbatch").write_text(text, encoding="utf-8")
    is_requeued(simple("answer.sbatch", "--time=30", go=False, name="train.py"))


@SLOW
def test_the_number_of_requeues_has_a_limit(clone, simple):
    edit(clone / BATCH["04"], "max_requeues=20", "max_requeues=1")
    job = simple("04", *ON_NODE_1, go=False)
    job.cancel("--signal=TERM")
    job.wait_for(lambda: len(found(job)) == 2)
    job.cancel("--signal=TERM")
    assert "not requeued: no ./04_multinode.pt.interrupted, or 1 re" in job.becomes("FAILED").stdout


@SLOW
def test_slurms_daemon_dies_on_the_only_node(cluster, simple):
    """Slurm starts the job on the other node, and the old ranks end before it does."""
    job = simple("04", "--nodes=1", "--gpus-per-node=2", go=False)
    node = int(job.show("BatchHost")[-1])
    cluster.run("pkill", "-KILL", "-x", "slurmd", node=node)
    try:
        job.wait_for(lambda: len(found(job)) == 4)
        assert job.show("BatchHost") == f"node{3 - node}"
        assert not cluster.run("bash", "-c", "pgrep -f '[0]4_multinode.py' || true", node=node)
        (job.folder / "go").touch()
        assert job.becomes("COMPLETED").show("Restarts") == "1"
    finally:
        cluster.cut_the_power(node)
        cluster.switch_on(node)
        cluster.wait_until_idle()


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


def cpus():
    """Return how many CPUs slurmd finds on this machine."""
    found = subprocess.check_output(["slurmd", "-C"], env=Cluster("").environment, text=True)
    return int(re.search(r"\bCPUs=(\d+)", found)[1])


def with_affinity(kind):
    """Return a kind of cluster that binds tasks to CPUs; a node has as many as this machine."""

    class WithAffinity(kind):
        def _write_files(self):
            super()._write_files()
            for change in (
                ("TaskPlugin=task/none", "TaskPlugin=task/affinity"),
                ("CPUs=256 RealMemory=100000", f"CPUs={cpus()} RealMemory=1000"),
                ("SlurmdParameters=config_overrides", ""),
            ):
                edit(self.folder / "slurm.conf", *change)

    return WithAffinity


ASKS = (  # how a job asks for CPUs, besides two GPUs: the options, and the line in the file
    ("", "--cpus-per-gpu={half}"),
    ("--exclusive", "--cpus-per-gpu=1"),
    ("--exclusive", ""),
    ("--cpus-per-task={all}", ""),
    ("--exclusive --cpus-per-task=1", ""),
)


def check_cpus(kind, folder, clone):
    """Check that a task may use all CPUs of its node, however the job asks for them."""
    folder.mkdir()
    shows = "import os; print(len(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES'])"
    (clone / "01_single_gpu.py").write_text(shows, encoding="utf-8")
    text = (clone / BATCH["01"]).read_text(encoding="utf-8")
    with with_affinity(kind)(folder, gpus=2, environment=environment()) as cluster:
        number = cpus()
        for asks in ASKS:
            options, line = (part.format(all=number, half=number // 2) for part in asks)
            own = text.replace("#SBATCH --cpus-per-gpu=18", f"#SBATCH {line}" if line else "")
            (clone / "own.sbatch").write_text(own, encoding="utf-8")
            words = f"--wait --open-mode=truncate --output=out --gpus-per-node=2 {options}".split()
            cluster.run("sbatch", *words, "own.sbatch", cwd=clone)
            got = (
                number // 2 * 2 if "{half}" in asks[1] else number
            )  # of an odd number, one is left
            assert (clone / "out").read_text("utf-8").splitlines()[-1] == f"{got} 0,1", asks


@SLOW
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_task_has_all_cpus(tmp_path, clone):
    check_cpus(Cluster, tmp_path / "c", clone)


# ---------------------------------------------------------------- said once for a site


@SLOW
def test_what_is_said_once_for_a_site(cluster, clone, simple, monkeypatch):
    """Slurm reads its part for one command, and all batch files source one file."""
    for name, value in re.findall(r"(SBATCH_\w+)=(\S+)", in_the_guide(r"^(SBATCH_ACC.*)$")):
        monkeypatch.setitem(cluster.environment, name, value.replace("gpu", "urgent"))
    append = in_the_guide(r"^(cat >> (?s:.*?)^END\n)").replace("module ", "true ")
    cluster.run("bash", "-c", append.replace("/scratch/$USER", "."), cwd=clone)
    says = 'told = []\nos.write(1, os.environ["NCCL_SOCKET_IFNAME"].encode() + b" is set\\n")'
    job = simple("04", *ON_NODE_1, go=False, change=("told = []", says))
    assert job.stdout.count("ib0 is set\n") == 1
    assert (job.show("Partition"), job.show("Account")) == ("urgent", "project")
    job.cancel("--signal=TERM")
    job.wait_for((clone / "ladder" / "04_multinode.pt").exists)


@SLOW
def test_where_sbatch_exports_nothing(simple):
    job = simple("04", "--export=NONE", "--nodes=2", "--gpus-per-node=1")
    assert len(found(job.becomes("COMPLETED"))) == 2


@pytest.mark.weekly("builds Debian 13")
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_newer_slurm(tmp_path, clone, newer):
    """Slurm 24.11: the CPUs of a task, and the requeue of one task of an array."""
    check_cpus(newer, tmp_path / "c", clone)
    (clone / "04_multinode.py").write_text(SIMPLE, encoding="utf-8")
    (tmp_path / "a").mkdir()
    with newer(tmp_path / "a", environment=environment()) as cluster:
        words = *ON_NODE_1, "--array=1-2", "--job-name=sweep", "--export=NONE", BATCH["04"]
        job = Submitted(cluster, clone, *words)
        job.wait_for(lambda: len(list(clone.glob("sweep_*.out"))) == 2)
        job.number = f"{job.number}_2"
        job.wait_for(
            lambda: "finds" in clone.joinpath(f"sweep_{job.show('JobId')}.out").read_text()
        )
        job.cancel("--signal=TERM")
        job.wait_for(lambda: job.show("Restarts") == "1")
        (clone / "go").touch()
        job.becomes("COMPLETED")
    assert (clone / "sweep_2.pt").exists()


# ---------------------------------------------------------------- the end


@SLOW
def test_the_rank_that_ends_last(alone, clone, submit):
    """srun waits --wait seconds for the others of the first task that has ended."""
    late = "import os, time; time.sleep(8 * (os.environ['RANK'] == '0')); print('uploaded')"
    (clone / "04_multinode.py").write_text(late, encoding="utf-8")
    for before, after, ends in ((300, 2, "FAILED"), (2, 60, "COMPLETED")):
        edit(clone / alone, f"--wait={before}", f"--wait={after}")
        job = submit(alone, options=("--nodes=2", "--gpus-per-node=1")).becomes(ends)
        assert job.stdout.count("uploaded") == (1 if after == 2 else 2)
