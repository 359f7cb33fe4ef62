"""Jobs that share a cluster and a folder with others: who is requeued, and who waits for whom."""

import contextlib
import re
import subprocess

import pytest
from clusters import (
    BATCH,
    ON_A_CLUSTER,
    ON_NODE_1,
    SIMPLE,
    TWO_BY_TWO,
    found,
    in_the_guide,
    second_launcher,
)
from support.scripts import ROOT, edit, write

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
        assert "failed with status" not in job.stdout


# ---------------------------------------------------------------- a script of a stranger's


@pytest.fixture
def stranger(clone, submit):
    """Submit a batch file for a script `train.py` from a folder that holds nothing else."""
    folder = clone / "elsewhere"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "bin").symlink_to(clone / ".venv" / "bin")

    def submit_train(launch, script):
        text = (ROOT / BATCH["04"]).read_text(encoding="utf-8")
        one, two, old, new = in_the_guide(r"^```diff\n-(.*\n)-(.*\n)-(.*\n)\+(.*\n)```")
        path = write(folder / "job.sbatch", text, [(one, ""), (two, ""), (old, new)])
        if launch == "srun":
            path.write_text(second_launcher(path.read_text("utf-8")), encoding="utf-8")
        (folder / "train.py").write_text(script, encoding="utf-8")
        return submit("job.sbatch", options=("--job-name=own", *TWO_BY_TWO), folder=folder)

    return submit_train


@pytest.mark.parametrize(("launch", "rank"), [("torchrun", "RANK"), ("srun", "SLURM_PROCID")])
def test_a_train_py_of_your_own(stranger, launch, rank):
    """The file is whole without this repository."""
    job = stranger(launch, SIMPLE.replace("WORLD_SIZE", rank))
    ranks = [f"{number} 1 {16 if launch == 'torchrun' else 8} 0,1" for number in range(4)]
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
    write(clone / "far.sbatch", text, [("dir=.", "dir=far")])
    jobs = []
    for name, file, words in (
        ("a", "far.sbatch", []),
        ("b", "04", ["--checkpoint-path=far/b.pt"]),
        ("c", "04", ["--checkpoint-path", "far/c.pt"]),
    ):
        jobs.append(simple(file, *ON_NODE_1, f"--job-name={name}", go=False, arguments=words))
    are_requeued(*jobs)
    assert {*clone.glob("**/*.pt")} == {clone / "far" / f"{name}.pt" for name in "abc"}


def test_an_array_is_a_sweep(cluster, simple):
    """Its tasks run at once, save to files of their own, and are requeued one by one."""
    array = in_the_guide(r"^sbatch (--array=\S+ --job-name=\S+) ").split()
    job = simple("04", *ON_NODE_1, *array, go=False)
    number, folder = job.number, job.folder
    start = "cat sweep_*.out | grep --count finds || true"
    job.wait_for(lambda: cluster.run("bash", "-c", start, cwd=folder) == "3\n")
    for task in ("1", "3"):  # the number of the last task is that of the array
        job.number = f"{number}_{task}"
        with contextlib.suppress(subprocess.CalledProcessError):
            job.cancel("--signal=TERM")  # Slurm 22.05 delivers it, then asks to try again later
        job.wait_for(lambda: job.show("Restarts") == "1")
    (folder / "go").touch()
    for task, restarts in (("1", "1"), ("2", "0"), ("3", "1")):
        job.number = f"{number}_{task}"
        assert job.becomes("COMPLETED").show("Restarts") == restarts
    assert {*folder.glob("*.pt")} == {folder / "sweep_1.pt", folder / "sweep_3.pt"}


def test_a_chain(cluster, clone, simple, submit):
    """The jobs run one after the other; the first is requeued once, and a cancelled one saves."""
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


@pytest.mark.parametrize(("mode", "ends"), [("REQUEUE", "COMPLETED"), ("CANCEL", "PREEMPTED")])
def test_preempted_without_a_grace_time(cluster, clone, simple, mode, ends):
    """It saves, and starts again when the other job has ended, unless Slurm cancels it."""
    change = ["scontrol", "update", "PartitionName=gpu"]
    cluster.run(*change, "GraceTime=0", f"PreemptMode={mode}")
    try:
        job = simple("04", *ON_NODE_1, go=False)
        taker = "--partition=urgent", "--nodelist=node1", "--exclusive", "--output=/dev/null"
        cluster.run("sbatch", *taker, "--wrap=sleep 5")
        job.wait_for(job.checkpoint.exists)
        (clone / "go").touch()
        job.becomes(ends)
    finally:
        cluster.run(*change, "GraceTime=60", "PreemptMode=REQUEUE")


# ---------------------------------------------------------------- beside other jobs


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
    edit(clone / "04_multinode.py", '"CUDA_VISIBLE_DEVICES"', '"NCCL_SOCKET_IFNAME"')
    job = simple("04", *ON_NODE_1, go=False)
    assert found(job) == ["1 1 8 ib0"]
    assert (job.show("Partition"), job.show("Account")) == ("urgent", "project")
    job.cancel("--signal=TERM")
    job.wait_for((clone / "ladder" / "04_multinode.pt").exists)
