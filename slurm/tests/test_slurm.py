"""The batch files, submitted to a real Slurm cluster whose nodes really fail."""

import contextlib
import os
import re
import subprocess
import time

import pytest
from clusters import BATCH, ON_A_CLUSTER, ON_TWO_NODES, SIMPLE, found, in_the_guide
from support.results import accuracy, epochs, same_bits
from support.scripts import ROOT, SMALL, edit, write

SLOW = pytest.mark.slow
ONE, TWO = ("1", *SMALL), ("2", *SMALL)

pytestmark = ON_A_CLUSTER


# ---------------------------------------------------------------- the text


def test_the_files_of_steps_4_and_5_are_the_same():
    four, five = ((ROOT / BATCH[step]).read_text(encoding="utf-8") for step in ("04", "05"))
    assert four.replace("04_multinode", "05_gather_eval") == five


def test_torchrun_kills_before_slurm_does():
    text = (ROOT / BATCH["04"]).read_text(encoding="utf-8")
    warned, allowed = re.search(r"=TERM@(\d+)\n(?s:.*)_SHUTDOWN_TIMEOUT=(\d+) ", text).groups()
    assert 30 < int(allowed) < int(warned)  # 30 is torchrun's default


# ---------------------------------------------------------------- unchanged


def test_the_first_small_job(cluster, submit, trained):
    """As the guide shows it, but for fewer epochs and a smaller model, and from inside a step."""
    seen = cluster.run("bash", "-c", in_the_guide("^(sinfo .*)$"))
    assert seen.split("\n")[1].split() == ["gpu*", "2", "gpu:a100:4", "256", "100000"]
    job = submit("01", *ONE, options=["--export=ALL,SLURM_STEP_ID=0,port=1"]).becomes("COMPLETED")
    assert accuracy(job)
    assert same_bits(job.checkpoint, trained("01", *ONE))


@pytest.mark.weekly("each file once as it is: what differs from steps 1 and 4 are a few options")
@pytest.mark.parametrize("step", ["02", "03", "04", "05", "alone.sbatch"])
@pytest.mark.usefixtures("alone")
def test_submitted_as_it_is(submit, trained, step):
    size = {"02": 2, "03": 2}.get(step, 8)
    job = submit(step, *ONE).becomes("COMPLETED")
    assert not re.search(r"^\[W\d+ ", job.stdout, re.MULTILINE)  # a warning of PyTorch's C++ code
    assert same_bits(job.checkpoint, trained("03", *ONE, nprocs=size))


# ---------------------------------------------------------------- a job whose nodes fail

# In a copy of step 4, rank 0 waits at step S in life L of the job while there is a file gate-L-S.
ASK = "            if step % 10 == 0 and self._stop_agreed():"
GATE = f"""\
            gate = f"gate-{{os.environ.get('SLURM_RESTART_COUNT', 0)}}-{{step}}"
            while dist.get_rank() == 0 and os.path.exists(gate) and not stop_signals:
                open(f"{{gate}}-reached", "w").close()
                time.sleep(0.01)
{ASK}"""


def submit_gated(clone, submit, *gates):
    """Submit step 4 with these gates on two nodes."""
    edit(clone / "04_multinode.py", ASK, GATE)
    for gate in gates:
        (clone / gate).touch()
    return submit("04", *TWO, options=ON_TWO_NODES)


def wait_at(job, gate):
    """Wait until rank 0 is at a gate, and return the gate; it opens when it is unlinked."""
    job.wait_for((job.folder / f"{gate}-reached").exists)
    return job.folder / gate


@pytest.fixture
def healed(cluster):
    """Restore the second node after the test."""
    yield
    cluster.cable(2, "up")
    with contextlib.suppress(subprocess.CalledProcessError):
        cluster.cut_the_power(2)
    cluster.switch_on(2)
    cluster.wait_until_idle(timeout=120)


def move_the_limit(cluster, job):
    """Let the job's time be up in 30 to 90 seconds; Slurm looks at the clock every 30 s."""
    hours, minutes, seconds = map(int, job.show("RunTime").split(":"))
    near = 60 * hours + minutes + (1 if seconds < 30 else 2)
    cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={near}")


@SLOW
@pytest.mark.usefixtures("healed")
def test_a_job_outlives_all_of_this(cluster, clone, submit, trained):
    """Its cable is pulled for a while, its time is up, a node is cut off, another reboots."""
    job = submit_gated(clone, submit, "gate-0-15", "gate-0-35", "gate-1-15", "gate-2-15")
    gate = wait_at(job, "gate-0-15")
    cluster.cable(2, "down")
    gate.unlink()
    time.sleep(4)
    assert not (clone / "gate-0-35-reached").exists()  # all ranks wait in a collective ...
    cluster.cable(2, "up")
    wait_at(job, "gate-0-35")  # ... and go on

    move_the_limit(cluster, job)
    job.becomes("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=9")
    assert "interrupted after 5,120 samples of the epoch" in job.stdout  # 40 steps of 2 x 64

    # The node is switched off before it returns: then, Slurm cleans up the old run there, and has
    # been seen to kill the new one, whose step has the same number.
    gate = wait_at(job, "gate-1-15")
    assert not job.interrupted
    cluster.cable(2, "down")
    gate.unlink()
    job.becomes("PENDING")
    cluster.cut_the_power(2)
    cluster.cable(2, "up")
    cluster.switch_on(2)

    wait_at(job, "gate-2-15")
    cluster.cut_the_power(1)  # this node runs the batch file, so Slurm requeues the job at once
    cluster.switch_on(1)

    assert job.becomes("COMPLETED").show("Restarts") == "3"
    assert job.stdout.count(f"resuming from ./{job.checkpoint.name} after epoch 0") == 3
    assert epochs(job) == [1, 2], job.stdout
    assert same_bits(job.checkpoint, trained("03", *TWO))


@pytest.mark.weekly("takes minutes: Slurm gives up the lost task late")
@pytest.mark.usefixtures("healed")
def test_a_node_reboots_before_slurm_misses_it(cluster, clone, submit, trained):
    """Its task is lost: the other ranks fail, srun gives up, and Slurm does not requeue the job."""
    edit(clone / BATCH["04"], "--wait=300", "--wait=5")
    job = submit_gated(clone, submit, "gate-0-15")
    gate = wait_at(job, "gate-0-15")
    cluster.shut_down(2)  # this closes the connections: without --wait, srun would wait for ever
    cluster.switch_on(2)
    gate.unlink()  # at the latest, the next collective fails
    assert job.becomes("FAILED").show("Restarts") == "0"
    assert "Timed out waiting for job step to complete" in job.stdout
    job = submit("04", *TWO, options=ON_TWO_NODES).becomes("COMPLETED")
    assert same_bits(job.checkpoint, trained("03", *TWO))


# ---------------------------------------------------------------- does not start

CHANGED = {  # batch files with a change: name -> (step, text, what is in its place)
    "none.sbatch": ("01", "#SBATCH --gpus-per-node=1\n#SBATCH --cpus-per-gpu=8\n", ""),
    "few.sbatch": ("02", "#SBATCH --cpus-per-gpu=8\n", ""),
    "lost.sbatch": ("04", "host=$(scontrol show hostnames | head -n 1)", "host=lost.invalid"),
    "taken.sbatch": ("04", "port=$((20000 + SLURM_JOB_ID % 10000))", "port=6818"),  # slurmd's
}
REFUSED = (  # file or step, option of sbatch, arguments of the script, message
    ("none.sbatch", "--job-name=none", [], "the job has no GPU"),
    ("few.sbatch", "--job-name=few", [], "the job has fewer CPUs than GPUs"),
    ("lost.sbatch", "--job-name=lost", [], "host 'lost.invalid' cannot be resolved"),
    ("taken.sbatch", "--job-name=taken", [], "port 6818 of node1 is already in use"),
    ("01", "--chdir=/", [], "no .venv: submit from the top of the repository"),
    ("01", "--job-name=theirs", [], "./theirs.pt belongs to another user: choose another --job-n"),
    ("01", "--job-name=both", [], "./both.pt.owner belongs to another user"),
    ("01", "--export=ALL,SLURM_ARRAY_TASK_ID=1", [], "submitted from inside an array"),
    ("03", "--job-name=a", ["--checkpoint-path=my runs/x.pt"], "must not contain a space"),
    ("03", "--job-name=b", ["--checkpoint-path", "my runs/x.pt"], "must not contain a space"),
    ("04", "--job-name=c", ["--checkpoint-path=far/x.pt"], "no file can be created beside far/x"),
    ("04", "--array=7", ["--checkpoint-path=x.pt"], "array tasks need a checkpoint each"),
    ("01", "--job-name=d", ["--checkpoint=x.pt"], "write --checkpoint-path instead of --check"),
    ("03", "--nodes=2", [], "steps 1 to 3 run on one node"),
    ("04", "--time=4", [], "--time has to be 5 minutes or more"),
)


@SLOW
def test_what_is_refused(clone, submit):
    """A job that would hang, or harm another, ends at once with a line that says why."""
    for name, (step, *change) in CHANGED.items():
        write(clone / name, (clone / BATCH[step]).read_text(encoding="utf-8"), [change])
    for name in ("theirs.pt", "both.pt.owner"):
        (clone / name).touch()
        os.chown(clone / name, 65534, 65534)
    jobs = []
    for file, option, arguments, _ in REFUSED:
        options = [option, f"--output={clone}/refused_%j.out"]
        jobs.append(submit(file, *arguments, options=options))
    for job, (*_, message) in zip(jobs, REFUSED):
        assert message in job.becomes("FAILED").stdout.splitlines()[-1]


# ---------------------------------------------------------------- ways to ask for nodes and GPUs


@SLOW
def test_a_node_runs_as_many_processes_as_it_has_gpus(cluster, alone, clone, simple, monkeypatch):
    """What a rank finds: the world size, its threads, the CPUs of its task, and GPUs."""
    monkeypatch.delitem(cluster.environment, "OMP_NUM_THREADS")
    spawned = SIMPLE.replace('"WORLD_SIZE"', '"SLURM_NNODES"')
    (clone / "02_multigpu_spawn.py").write_text(spawned, encoding="utf-8")
    text = (clone / BATCH["04"]).read_text(encoding="utf-8")
    asks = "#SBATCH --gpus-per-node=4\n#SBATCH --cpus-per-gpu=8\n"
    write(clone / "own.sbatch", text, [(asks, "")])
    jobs = []
    for file, options, ranks, finds, gpus in (
        ("02", "--exclusive", 1, "1 64 256", 4),
        ("04", "--nodes=1 --gpus-per-node=2 --exclusive", 4, "4 64 256", 4),
        ("04", "--nodes=1 --gpus-per-node=a100:2", 2, "2 8 16", 2),
        ("04", "--nodes=1 --gpus-per-task=2 --gpus-per-node=2 --cpus-per-gpu=2", 2, "2 2 4", 2),
        ("04", "--gpus-per-node=1 --export=NONE", 2, "2 8 8", 1),
        ("own.sbatch", "--gpus-per-node=2 --cpus-per-task=32", 4, "4 16 32", 2),
        ("own.sbatch", "--gres=gpu:2 --cpus-per-task=32", 4, "4 16 32", 2),
        (alone, "--gpus-per-node=2 --exclusive", 8, "8 64 64", 4),
        (alone, "--gpus-per-task=2 --gpus-per-node=2 --cpus-per-gpu=9", 4, "4 9 9", 2),
    ):
        job = simple(file, f"--job-name=job{len(jobs)}", *options.split())
        jobs.append((job, [(finds, gpus)] * ranks))
    for job, expected in jobs:
        lines = [line.rpartition(" ") for line in found(job.becomes("COMPLETED"))]
        assert [(finds, len(ids.split(","))) for finds, _, ids in lines] == expected


@pytest.mark.weekly("takes minutes: it trains dozens of times")
def test_scaling_over_nodes(submit):
    quick = ("--repeats=1", "--epochs=2", "--width=4", "--batch-size=256")
    job = submit("slurm/scaling.sbatch", *quick, options=("--gpus-per-node=1",))
    job.becomes("COMPLETED")
    measured = re.findall(r"^\| (weak|strong) \| (\d) \| (\d+) \|", job.stdout, re.MULTILINE)
    sizes = {("strong", "1", "512"), ("strong", "2", "256")}
    assert set(measured) == sizes | {("weak", "1", "256"), ("weak", "2", "256")}
    assert (job.folder / "scaling.json").exists()
