"""Jobs that share a cluster and a folder with others: who is requeued, and who waits for whom."""

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
    clone_into,
    found,
    in_the_guide,
    second_launcher,
)
from practice.cluster import Cluster
from support.jobs import environment
from support.scripts import ROOT, edit

pytestmark = [ON_A_CLUSTER, pytest.mark.slow]


def are_requeued(*jobs):
    """Send SIGTERM to jobs; they are requeued, and then they finish."""
    for job in jobs:
        job.cancel("--signal=TERM")
    for job in jobs:
        job.becomes("PENDING")
    (jobs[0].folder / "go").touch()
    for job in jobs:
        assert job.becomes("COMPLETED").show("Restarts") == "1"


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

    def submit_train(launch, script):
        text = (ROOT / BATCH["04"]).read_text(encoding="utf-8")
        *gone, old, new = in_the_guide(r"^```diff\n-(.*\n)-(.*\n)-(.*\n)\+(.*\n)```")
        for line in (*gone, old):
            assert text.count(line) == 1
            text = text.replace(line, new if line == old else "")
        if launch == "srun":
            text = second_launcher(text)
        (folder / "job.sbatch").write_text(text, encoding="utf-8")
        (folder / "train.py").write_text(script, encoding="utf-8")
        return submit("job.sbatch", options=("--job-name=own", *TWO_BY_TWO), folder=folder)

    return submit_train


@pytest.mark.parametrize(("launch", "rank"), [("torchrun", "RANK"), ("srun", "SLURM_PROCID")])
def test_a_train_py_of_your_own(stranger, launch, rank):
    """The file is whole without this repository; what failed and left the file is requeued."""
    job = stranger(launch, SIMPLE.replace("WORLD_SIZE", rank).replace("if told:\n", LEAVES_IT))
    ranks = [f"{number} 1 0,1" for number in range(4)]
    job.wait_for(lambda: found(job) == ranks)
    are_requeued(job)
    assert found(job) == sorted(ranks * 2)


def test_a_script_for_the_other_launcher_is_an_error(stranger):
    """Otherwise it would take the number of its node for its rank, and wait for ever."""
    job = stranger("torchrun", "import os; print(int(os.environ.get('SLURM_PROCID', 0)))")
    message = "ValueError: invalid literal for int() with base 10: 'use_RANK'"
    assert message in job.becomes("FAILED").stdout
    last = r"failed with status [1-9]\d* \(see above\), not requeued: no ./own.pt.interrupted, .*"
    assert re.fullmatch(last, job.stdout.splitlines()[-1])


# ---------------------------------------------------------------- requeued, or not


def test_a_checkpoint_elsewhere(clone, simple):
    """Its path is typed after the file name, in either way, or the batch file names its folder."""
    (clone / "far").mkdir()
    text = (clone / BATCH["04"]).read_text(encoding="utf-8")
    (clone / "far.sbatch").write_text(text.replace("dir=.", "dir=far"), encoding="utf-8")
    jobs = [simple("far.sbatch", *ON_NODE_1, "--job-name=a", go=False)]
    for name, words in (
        ("b", ["--checkpoint-path=far/b.pt"]),
        ("c", ["--checkpoint-path", "far/c.pt"]),
    ):
        jobs.append(simple("04", *ON_NODE_1, f"--job-name={name}", go=False, arguments=words))
    are_requeued(*jobs)
    assert sorted(str(path.relative_to(clone)) for path in clone.glob("**/*.pt")) == [
        f"far/{name}.pt" for name in "abc"
    ]


def test_an_array_is_a_sweep(simple):
    """Its tasks run at once, save to files of their own, and are requeued one by one."""
    array = in_the_guide(r"^sbatch (--array=\S+ --job-name=\S+) ").split()
    job = simple("04", *ON_NODE_1, *array, go=False)
    number = job.number

    def starts():
        outputs = [path.read_text("utf-8") for path in job.folder.glob("sweep_*.out")]
        return "".join(outputs).count("finds")

    job.wait_for(lambda: starts() == 3)
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


def test_a_chain(cluster, clone, simple, submit):
    """Jobs of one name run one after the other, even if the first is requeued, which it is once.

    The last one is not needed, and the one before it saves when it is cancelled.
    """
    edit(clone / BATCH["04"], "max_requeues=20", "max_requeues=1")
    assert in_the_guide(r"^for i in 1 2 3; do sbatch (\S+) 50; done$") == BATCH["04"]
    first = simple("04", *ON_NODE_1, go=False)
    second, third = (submit("04", options=ON_NODE_1) for _ in range(2))
    first.cancel("--signal=TERM")
    first.wait_for(lambda: len(found(first)) == 2)
    assert (second.show("JobState"), second.show("Reason")) == ("PENDING", "Dependency")
    first.cancel("--signal=TERM")
    last = "not requeued: no ./04_multinode.pt.interrupted, or 1 restarts"
    assert last in first.becomes("FAILED").stdout
    second.wait_for(lambda: found(second))
    assert not second.interrupted
    cluster.run("bash", "-c", in_the_guide(r"^(scancel --me .*)$"))
    third.becomes("CANCELLED")
    second.cancel()
    second.becomes("CANCELLED")
    cluster.wait_until_idle()  # by then, the batch file has ended
    assert second.interrupted
    assert second.show("Restarts") == "0"


def test_the_answer_that_can_be_copied(clone, simple):
    """The batch file of an answer in more/lookup/slurm.md requeues, too."""
    page = (ROOT / "more" / "lookup" / "slurm.md").read_text(encoding="utf-8")
    block = re.search(r"^```bash\n(#SBATCH --signal=TERM@90\n(?s:.*?))```", page, re.MULTILINE)[1]
    block = block.replace("torchrun … train.py", "torchrun --standalone train.py")
    text = f"#!/bin/bash\n#SBATCH --output=%x_%j.out\n{block}"
    text = text.replace("path=", "source .venv/bin/activate\npath=", 1)
    (clone / "answer.sbatch").write_text(text, encoding="utf-8")
    are_requeued(simple("answer.sbatch", "--time=30", go=False, name="train.py"))


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


@pytest.fixture
def partition(cluster):
    """Return a function that changes the partition `gpu`, until the end of the test."""

    def change(*settings):
        cluster.run("scontrol", "update", "PartitionName=gpu", *settings)

    yield change
    change("GraceTime=60", "PreemptMode=REQUEUE")


@pytest.mark.parametrize(("grace", "mode"), [(0, "REQUEUE"), (0, "CANCEL"), (60, "CANCEL")])
def test_preempted(cluster, partition, clone, simple, grace, mode):
    """A job of higher priority takes its node. It saves, and starts again when that has ended.

    If Slurm cancels it without a grace time, nothing is left to requeue it. With a grace time,
    it is requeued in the guide's session, too.
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


def test_two_users_start_at_once(cluster):
    """Their jobs have one name and one folder. Before anything is saved, one of them fails."""
    folder = clone_into(cluster.folder / "project")
    folder.chmod(0o777)
    trains = 'python \\\n    01_single_gpu.py --checkpoint-path="$checkpoint" "$@"'
    edit(folder / BATCH["01"], trains, "sleep 600")
    nobody = "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"
    jobs = [Submitted(cluster, folder, BATCH["01"], become=user) for user in ((), nobody)]
    states = lambda: sorted(job.show("JobState") for job in jobs)  # noqa: E731
    try:
        jobs[0].wait_for(lambda: states() == ["FAILED", "RUNNING"], timeout=60)
        (failed,) = (job for job in jobs if job.show("JobState") == "FAILED")
        assert failed.stdout.startswith("./01_single_gpu.pt.owner belongs to another user: choose")
    finally:
        for job in jobs:
            job.cancel()
        cluster.wait_until_idle()


def test_two_jobs_with_one_checkpoint(cluster, clone, simple, submit):
    """Singleton does not separate them, so the second one waits until the first has ended."""
    words = "--checkpoint-path=shared.pt"
    first = simple("04", *ON_NODE_1, "--job-name=a", go=False, arguments=[words])
    second = submit("04", words, options=(*ON_NODE_1, "--job-name=b"))
    waits = "pgrep -f '^sleep 5$' || true"
    second.wait_for(lambda: cluster.run("bash", "-c", waits, node=1))
    assert second.becomes("RUNNING").stdout == ""
    (clone / "go").touch()
    first.becomes("COMPLETED")
    second.becomes("COMPLETED")
    owner = (clone / "shared.pt.owner").read_text(encoding="utf-8")
    assert owner == f"{second.number}\n"


def test_a_signal_reaches_one_job_only(cluster, clone, simple):
    """where.py sends it to the ranks of a job, and not to those of another on the same node."""
    one, two = (simple("04", *ON_NODE_1, f"--job-name={name}", go=False) for name in ("a", "b"))
    command = in_the_guide(r"^(python .*where.py 24 --signal.*)$").replace("24", str(one.number))
    cluster.run("bash", "-c", f"source .venv/bin/activate; {command}", cwd=clone)
    assert "Signal 6 (SIGABRT)" in one.becomes("FAILED").stdout
    (clone / "go").touch()
    assert two.becomes("COMPLETED").stdout.count("finds") == 1


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


def test_the_rank_that_ends_last(alone, clone, submit):
    """srun waits --wait seconds for the others of the first task that has ended."""
    late = "import os, time; time.sleep(8 * (os.environ['RANK'] == '0')); print('uploaded')"
    (clone / "04_multinode.py").write_text(late, encoding="utf-8")
    text = (clone / alone).read_text(encoding="utf-8")
    jobs = []
    for wait in (2, 60):
        (clone / alone).write_text(text.replace("--wait=300", f"--wait={wait}"), encoding="utf-8")
        options = ("--nodes=2", "--gpus-per-node=1", f"--job-name=wait{wait}")
        jobs.append(submit(alone, options=options))
    for job, ends, uploaded in zip(jobs, ("FAILED", "COMPLETED"), (1, 2)):
        assert job.becomes(ends).stdout.count("uploaded") == uploaded


# ---------------------------------------------------------------- the CPUs of a task, by version


def cpus():
    """Return how many CPUs slurmd finds on this machine."""
    shown = subprocess.check_output(["slurmd", "-C"], env=Cluster("").environment, text=True)
    return int(re.search(r"\bCPUs=(\d+)", shown)[1])


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
    ("", "#SBATCH --cpus-per-gpu={half}"),
    ("--exclusive", "#SBATCH --cpus-per-gpu=1"),
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
        jobs = []
        for asks in ASKS:
            options, line = (part.format(all=cpus(), half=cpus() // 2) for part in asks)
            own = text.replace("#SBATCH --cpus-per-gpu=8", line)
            (clone / "own.sbatch").write_text(own, encoding="utf-8")
            words = "--gpus-per-node=2", *options.split(), "own.sbatch"
            jobs.append(Submitted(cluster, clone, *words))
        for job, (_, line) in zip(jobs, ASKS):
            number = (
                cpus() // 2 * 2 if "{half}" in line else cpus()
            )  # of an odd number, one is left
            shown = job.becomes("COMPLETED").stdout.splitlines()[-1]
            assert shown == f"{number} 0,1", (line, job.number)


@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_task_has_all_cpus(tmp_path, clone):
    check_cpus(Cluster, tmp_path / "c", clone)


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
        output = clone / f"sweep_{job.show('JobId')}.out"
        job.wait_for(lambda: "finds" in output.read_text(encoding="utf-8"))
        job.cancel("--signal=TERM")
        job.wait_for(lambda: job.show("Restarts") == "1")
        (clone / "go").touch()
        job.becomes("COMPLETED")
    assert (clone / "sweep_2.pt").exists()
