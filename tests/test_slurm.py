"""The batch files, submitted as they are to a real Slurm, on nodes that fail for real."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster, missing
from conftest import ROOT, SCRIPT, SCRIPTS, SMALL, environment, same_bits

FILE = {path.name[:2]: f"{path.stem}.sbatch" for path in SCRIPTS}
EVERYTHING = pytest.mark.everything
TRAINING = ("6", *SMALL)
LONG = ("30", *SMALL)  # long enough to be hurt in the midst of it
TWO_BY_TWO = ("--nodes=2", "--gpus-per-node=2")

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), environment=environment()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository as a reader has it, with a virtual environment in it."""
    folder = tmp_path_factory.mktemp("clone")
    for path in SCRIPTS:
        shutil.copy(path, folder)
    for name in ("slurm", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    activate = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    (folder / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")
    return folder


class Submitted:
    """A job in the queue, submitted from a folder that is not the repository."""

    def __init__(self, cluster, clone, folder, step, *arguments, options=()):
        self.cluster, self.folder = cluster, folder
        path = clone / "slurm" / FILE.get(step, step)
        self.number = cluster.sbatch(*options, path, *arguments, cwd=folder)

    @property
    def output(self):
        (path,) = self.folder.glob(f"*_{self.number}.out")
        return path.read_text(encoding="utf-8")

    @property
    def checkpoint(self):
        return self.folder / f"{self.show('JobName')}.pt"

    def show(self, name):
        return self.cluster.show(self.number)[name]

    def wait(self, *states, timeout=180):
        """Wait until the job has ended, or is in one of these states; return the state."""
        try:
            return self.cluster.wait(self.number, *states, timeout=timeout)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{self.output}")

    def completed(self, timeout=180):
        assert self.wait(timeout=timeout) == "COMPLETED", self.output
        return self

    def wait_for(self, pattern, timeout=120):
        end = time.monotonic() + timeout
        while not list(self.folder.glob(f"*_{self.number}.out")) or not re.search(
            pattern, self.output, re.MULTILINE
        ):
            state = self.show("JobState")
            if time.monotonic() > end or state not in ("PENDING", "RUNNING", "CONFIGURING"):
                pytest.fail(f"waited for {pattern!r} in vain, {state}:\n{self.output}")
            time.sleep(0.05)

    def epochs(self):
        return [int(n) for n in re.findall(r"^epoch (\d+) ", self.output, re.MULTILINE)]


@pytest.fixture
def submit(cluster, clone, tmp_path):
    """Submit a step's file; whatever is left of the jobs at the end is cancelled."""
    jobs = []

    def submit(step, *arguments, options=()):
        jobs.append(Submitted(cluster, clone, tmp_path, step, *arguments, options=options))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.run("scancel", job.number)
    cluster.wait_until_idle()


def values(cluster, node, variable):
    """Return the values that a variable has in the environments of a node's processes."""
    found = f"grep -azhE ^{variable}= /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n'"
    lines = cluster.run("bash", "-c", found, node=node).splitlines()
    return {line.split("=", 1)[1] for line in lines}


def ranks(cluster, node):
    """Return the ranks of the processes that run on a node."""
    return {int(value) for value in values(cluster, node, "RANK")}


# ---------------------------------------------------------------- as they are


def uncommented(clone):
    """Write a copy of step 4's file with its second launcher in use; return its name."""
    lines, inside = [], False
    for line in (clone / "slurm" / FILE["04"]).read_text(encoding="utf-8").splitlines():
        inside = line.startswith("# launch=") or (inside and line.startswith("#     "))
        lines.append(line.removeprefix("# ") if inside else line)
    assert sum(line.startswith("launch=(srun ") for line in lines) == 2
    (clone / "slurm" / "alone.sbatch").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return "alone.sbatch"


@pytest.mark.parametrize(
    "step", [pytest.param(n, marks=() if n == "04" else EVERYTHING) for n in FILE]
)
def test_submitted_as_it_is(cluster, submit, trained, step):
    size = {"01": 1, "02": 2, "03": 2, "04": 8, "05": 8}[step]
    job = submit(step, *TRAINING)
    if size == 8:
        job.wait_for("^epoch 1 ")
        seen = [ranks(cluster, node) for node in (1, 2)]
        assert sorted(seen, key=min) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
        where = r"world size 8 on node\[1-2\], rendezvous at 10.77.0.1 +node1 port 2\d{4}\n"
        assert re.search(where, job.output)
    job.completed()
    assert job.epochs() == [1, 2, 3, 4, 5, 6]
    assert re.search(r"^accuracy [\d.]+% \(\d+/359\)$", job.output, re.MULTILINE)
    assert same_bits(job.checkpoint, trained(step, *TRAINING, nprocs=size))


@EVERYTHING
def test_srun_alone(cluster, clone, submit, trained):
    job = submit(uncommented(clone), *TRAINING, options=TWO_BY_TWO)
    job.wait_for("^epoch 1 ")
    assert [ranks(cluster, node) for node in (1, 2)] == [{0, 1}, {2, 3}]
    assert not values(cluster, 1, "TORCHELASTIC_RUN_ID")
    job.completed()
    assert same_bits(job.checkpoint, trained("04", *TRAINING, nprocs=4))


@EVERYTHING
def test_overrides_from_the_command_line(submit, trained):
    job = submit("04", *TRAINING, options=("--nodes=1", "--gpus-per-node=3")).completed()
    assert "world size 3" in job.output
    assert same_bits(job.checkpoint, trained("04", *TRAINING, nprocs=3))


@EVERYTHING
def test_two_jobs_at_once_on_one_node(submit):
    here = ("--nodes=1", "--gpus-per-node=2", "--nodelist=node1")
    jobs = [submit("04", *LONG, options=(*here, f"--job-name={name}")) for name in "ab"]
    for job in jobs:
        job.wait_for("^epoch 1 ")
    assert [job.show("JobState") for job in jobs] == ["RUNNING", "RUNNING"]
    a, b = (job.completed() for job in jobs)
    assert same_bits(a.checkpoint, b.checkpoint)


@EVERYTHING
def test_by_hand(cluster, clone, tmp_path, trained):
    """What the README says of salloc."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    allocate = re.search(r"`(salloc --nodes=2 [^`]*)`", readme)[1].split()
    launch = re.search(r"`(srun --nodes=2 --gres=gpu:2 [^`]*)`", readme)[1]
    launch = launch.replace("HOST", "$(scontrol show hostnames | head -n 1)")
    launch = launch.replace("04_multinode.py", f"{clone}/04_multinode.py {' '.join(TRAINING)}")
    words = [*allocate, "bash", "-c", f"source {clone}/.venv/bin/activate; {launch}"]
    assert "accuracy" in cluster.run(*words, cwd=tmp_path)
    assert same_bits(tmp_path / "checkpoint.pt", trained("04", *TRAINING, nprocs=4))


@EVERYTHING
def test_threads_follow_the_cpus_of_the_job(cluster, clone, submit, monkeypatch):
    monkeypatch.delitem(cluster.environment, "OMP_NUM_THREADS")
    for step, options, threads in (
        ("01", (), 18),
        ("02", ("--cpus-per-task=6",), 3),
        ("04", ("--nodes=1", "--gpus-per-node=2", "--cpus-per-task=4"), 2),
    ):
        job = submit(step, "99", *SMALL, options=(*options, "--nodelist=node1"))
        job.wait_for("^epoch 1 ", timeout=300)
        assert values(cluster, 1, "OMP_NUM_THREADS") - {"1"} == {str(threads)}  # slurmd has 1
        cluster.run("scancel", job.number)
        cluster.wait_until_idle()


@EVERYTHING
def test_scaling_over_nodes(submit):
    quick = ("--repeats=1", "--epochs=2", "--width=4", "--batch-size=256")
    job = submit("scaling.sbatch", *quick, options=("--gpus-per-node=1",)).completed(timeout=300)
    measured = re.findall(r"^\| (weak|strong) \| (\d) \| (\d+) \|", job.output, re.MULTILINE)
    assert sorted(measured) == [
        ("strong", "1", "512"),
        ("strong", "2", "256"),
        ("weak", "1", "256"),
        ("weak", "2", "256"),
    ]
    assert (job.folder / "scaling.json").exists()


# ---------------------------------------------------------------- told to stop


def went_on(job, undisturbed, restarts=None):
    """See that a job has completed with the weights of an undisturbed one, no epoch run twice."""
    assert job.epochs() == list(range(1, 31)), job.output
    assert "interrupted after" in job.output
    assert restarts in (None, job.show("Restarts"))
    assert not job.checkpoint.with_suffix(".pt.interrupted").exists()
    assert same_bits(job.checkpoint, undisturbed)


@EVERYTHING
def test_told_to_stop_it_requeues_itself(cluster, submit, trained):
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for("^epoch 2 ")
    cluster.run("scancel", "--signal=TERM", job.number)
    job.completed()
    assert "SignalException: Process" in job.output  # which the README calls harmless
    went_on(job, trained("04", *LONG, nprocs=4), restarts="1")


@EVERYTHING
def test_at_the_end_of_its_time(cluster, submit, trained):
    """It is the same for Slurm whether the end comes nearer or is moved nearer.

    Slurm looks at the clock every 30 s: until then, one worker stands still, and all wait for it.
    """
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for("^epoch 2 ")
    cluster.run("pkill", "-STOP", "-f", "python.* -u ", node=2)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    job.wait_for("closing signal SIGTERM")
    cluster.run("pkill", "-CONT", "-f", "python.* -u ", node=2)
    job.wait("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")
    job.completed()
    went_on(job, trained("04", *LONG, nprocs=4), restarts="1")


@EVERYTHING
def test_cancelled_it_stays_cancelled(cluster, submit, trained):
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for("^epoch 2 ")
    cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED"
    assert "interrupted after" in job.output
    cluster.wait_until_idle()
    time.sleep(10)  # a requeued job starts after 5
    assert job.show("JobState") == "CANCELLED"
    again = submit("04", *LONG, options=TWO_BY_TWO).completed()
    assert f"{job.epochs()[-1]} of 30 epochs run" in again.output
    assert same_bits(again.checkpoint, trained("04", *LONG, nprocs=4))


@EVERYTHING
def test_a_chain(submit, trained):
    """As the file says, for sites where a job must not requeue itself."""
    job = submit("04", *TRAINING, options=(*TWO_BY_TWO, "--array=1-3%1"))
    ended, end = [], time.monotonic() + 120
    while len(ended) < 3 and time.monotonic() < end:
        outputs = [path.read_text(encoding="utf-8") for path in job.folder.glob("*.out")]
        ended = [text for text in outputs if "\naccuracy " in text]
        time.sleep(0.5)
    assert sorted("6 of 6 epochs run" in text for text in ended) == [False, True, True]
    assert same_bits(job.folder / "04_multinode.pt", trained("04", *TRAINING, nprocs=4))


# ---------------------------------------------------------------- failing


@pytest.fixture
def healed(cluster):
    """Whatever a test does to the second node, it is well again afterwards."""
    yield
    cluster.cable(2, "up")
    with contextlib.suppress(subprocess.CalledProcessError):
        cluster.cut_the_power(2)
    cluster.switch_on(2)
    cluster.wait_until_idle(timeout=120)


@EVERYTHING
@pytest.mark.usefixtures("healed")
def test_a_node_loses_its_power(cluster, submit, trained):
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for("^epoch 3 ")
    cluster.cut_the_power(2)
    job.wait("PENDING", timeout=120)
    cluster.switch_on(2)
    job.completed(timeout=300)
    assert job.show("Restarts") == "1"
    assert set(job.epochs()) == set(range(1, 31))
    assert same_bits(job.checkpoint, trained("04", *LONG, nprocs=4))


@EVERYTHING
@pytest.mark.usefixtures("healed")
def test_a_cable_is_pulled_for_a_while(cluster, submit, trained):
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for("^epoch 3 ")
    cluster.cable(2, "down")
    time.sleep(4)
    cluster.cable(2, "up")
    job.completed()
    assert job.show("Restarts") == "0"
    assert job.epochs() == list(range(1, 31))
    assert same_bits(job.checkpoint, trained("04", *LONG, nprocs=4))


@EVERYTHING
@pytest.mark.usefixtures("healed")
def test_a_cable_is_pulled_for_good(cluster, submit, trained):
    """Slurm gives the node up, and starts the job again when there are enough nodes.

    The node is started anew first: the old run's step, which Slurm clears away when the node comes
    back, has the number of the new one's, and has been seen to take that with it.
    """
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for("^epoch 3 ")
    cluster.cable(2, "down")
    job.wait("PENDING", timeout=120)
    cluster.cut_the_power(2)
    cluster.cable(2, "up")
    cluster.switch_on(2)
    job.completed(timeout=300)
    assert job.show("Restarts") == "1"
    assert same_bits(job.checkpoint, trained("04", *LONG, nprocs=4))


@EVERYTHING
def test_an_exception_on_one_rank_of_one_node(clone, submit):
    path = clone / "04_multinode.py"
    text = path.read_text(encoding="utf-8")
    line = "        self.optimizer.step()\n"
    try:
        bad = f"{line}        assert self.rank != 3, 'the first cause'\n"
        path.write_text(text.replace(line, bad), encoding="utf-8")
        job = submit("04", *LONG, options=TWO_BY_TWO)
        assert job.wait(timeout=60) == "FAILED", job.output
    finally:
        path.write_text(text, encoding="utf-8")
    assert "AssertionError: the first cause" in job.output
    first = job.output.split("Root Cause (first observed failure):")
    assert any("the first cause" in part for part in first[1:])
    assert job.show("Restarts") == "0"


@EVERYTHING
def test_a_host_that_has_no_name(cluster, submit):
    hosts = cluster.folder / "hosts"
    text = hosts.read_text(encoding="utf-8")
    try:
        hosts.write_text(text.replace("node1\n", "other\n"), encoding="utf-8")
        job = submit("04", *TRAINING, options=("--nodes=1",))
        assert job.wait() == "FAILED"
    finally:
        hosts.write_text(text, encoding="utf-8")
    assert "node1 cannot be resolved" in job.output


@EVERYTHING
def test_a_port_that_is_taken(cluster, submit):
    next_port = 20_001 + submit("01", "1", *SMALL).completed().number % 10_000
    listen = f"import socket, time; s = socket.create_server(('', {next_port})); time.sleep(60)"
    cluster.run("bash", "-c", f'"{sys.executable}" -c "{listen}" > /dev/null 2>&1 &', node=1)
    time.sleep(2)
    job = submit("04", *TRAINING, options=("--nodes=1", "--nodelist=node1"))
    assert job.wait() == "FAILED"
    assert f"port {next_port} of node1 is taken" in job.output
    cluster.run("pkill", "-f", "socket.create_server", node=1)


def by_hand(cluster, folder, words):
    """Submit one command on two nodes of two GPUs; return the job's state and its output."""
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--output=out"]
    line = f"{words} {SCRIPT['04']} 1 {' '.join(SMALL)}"
    activate = f"export PATH={Path(sys.executable).parent}:$PATH"
    job = cluster.sbatch(*options, f"--wrap={activate}; {line}", cwd=folder)
    return cluster.wait(job), (folder / "out").read_text(encoding="utf-8")


@EVERYTHING
@pytest.mark.parametrize(
    "words",
    [
        "torchrun --nnodes=2 --rdzv-endpoint=node1:29400",
        "srun torchrun --nnodes=2 --rdzv-endpoint=localhost:29400",
    ],
    ids=["without srun", "localhost"],
)
def test_agents_that_do_not_meet(cluster, tmp_path, words):
    options = "--nproc-per-node=2 --rdzv-backend=c10d --rdzv-conf=join_timeout=5"
    state, output = by_hand(cluster, tmp_path, f"{words} {options}")
    assert state == "FAILED"
    assert "RendezvousTimeoutError" in output
    assert "epoch" not in output


@EVERYTHING
def test_one_job_of_two_nodes_is_two_of_one(cluster, tmp_path):
    words = "srun torchrun --standalone --nproc-per-node=2"
    state, output = by_hand(cluster, tmp_path, words)
    assert state == "COMPLETED"
    assert output.count("epoch 1 ") == output.count("accuracy") == 2


# ---------------------------------------------------------------- each line is read


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda p: p.stem)
def test_every_line_is_read(cluster, path):
    """A misspelt # SBATCH would be but a comment; sbatch -v tells what it has understood."""
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.search("SBATCH *--", line)]
    lines.remove("##SBATCH --account=project")
    read = cluster.run("bash", "-c", f"sbatch -v --test-only {path} 2>&1")
    understood = set(re.findall(r"^sbatch: ([a-z-]+) +: ", read, re.MULTILINE)) - {"verbose"}
    written = {re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line)[1] for line in lines}
    assert understood == written | {"test-only"}
