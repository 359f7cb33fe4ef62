"""The batch files, submitted to a real Slurm cluster whose nodes really fail."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import BATCH, ON_A_CLUSTER, ON_TWO_NODES, ONE_CLUSTER, TWO_BY_TWO
from support.results import same_bits
from support.scripts import ROOT, SMALL, edit

FILES = sorted((ROOT / "slurm").glob("*.sbatch"))
GUIDE = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
SLOW = pytest.mark.slow
ON_NODE_1 = ("--nodes=1", "--nodelist=node1", "--gpus-per-node=1")
ONE, TWO = ("1", *SMALL), ("2", *SMALL)
COMMAND = re.compile(r"^srun .*\\\n(?: .*\n)+", re.MULTILINE)  # of steps 4 and 5

# What concerns the batch file alone is shown with this script in place of the step: it says what it
# finds, and waits until it is told to stop or, as some tests do at once, to go on.
SIMPLE = """\
import os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
path, rank = sys.argv[1].partition("=")[2], os.environ["RANK"]
found = [os.environ[n] for n in ("WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
os.write(1, f"finds {' '.join(found)}\\n".encode())
open(f"{path}.waiting-{rank}", "w").close()
while not told and not os.path.exists("go"):
    time.sleep(0.05)
if told:
    open(f"{path}.interrupted", "w").close()
    sys.exit(75)
"""

pytestmark = [ON_A_CLUSTER, ONE_CLUSTER]


@pytest.fixture
def simple(clone, submit):
    """Submit a step in a clone whose step 4 is SIMPLE; it goes on at once unless `go` is false."""

    def submit_simple(step, *options, go=True, change=("", ""), name="04_multinode.py"):
        (clone / name).write_text(SIMPLE.replace(*change), encoding="utf-8")
        if go:
            (clone / "go").touch()
        job = submit(step, options=options)
        if not go:
            job.wait_for(Path(f"{job.checkpoint}.waiting-0").exists)
        return job

    return submit_simple


@pytest.fixture
def alone(clone):
    """A copy of step 4's batch file with the guide's second launcher."""
    launch = re.search(r'^(srun --kill(?s:.*?)"\$@"\n)```', GUIDE, re.MULTILINE)[1]
    text = (clone / BATCH["04"]).read_text(encoding="utf-8")
    text, count = COMMAND.subn(lambda _: launch, text)
    assert count == 1
    (clone / "alone.sbatch").write_text(text, encoding="utf-8")
    return "alone.sbatch"


# ---------------------------------------------------------------- the text


def test_what_is_the_same_is_the_same_to_the_letter():
    """The lines to edit, but for numbers and their reasons, and all lines of steps 4 and 5."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
    assert (
        texts["04_multinode"].replace("04_multinode", "05_gather_eval") == texts["05_gather_eval"]
    )
    edits = {}
    for name, text in texts.items():
        part = re.search(r"^# EDIT .*?^source .*?\n", text, re.MULTILINE | re.DOTALL)[0]
        why = r"^# .*\n(?=#SBATCH --(?:nodes|time)=)"
        edits[name] = re.sub(why, "", re.sub(r"=[\d:]+$", "=", part, flags=re.M), flags=re.M)
    assert len(set(edits.values())) == 1, edits


def test_torchrun_kills_before_slurm_does():
    text = (ROOT / BATCH["04"]).read_text(encoding="utf-8")
    warned = int(re.search(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)[1])
    allowed = int(re.search(r"^export TORCH_\w+_SHUTDOWN_TIMEOUT=(\d+) ", text, re.MULTILINE)[1])
    assert 30 < allowed < warned  # 30 is torchrun's default


def test_every_line_is_read(cluster):
    """A misspelt #SBATCH would be a mere comment; sbatch -v prints the options that it has read."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if re.search("SBATCH *--", line)]
        lines.remove("##SBATCH --account=project")
        read = cluster.run("bash", "-c", f"sbatch -v --test-only {path} 2>&1")
        understood = set(re.findall(r"^sbatch: ([a-z-]+) +: ", read, re.MULTILINE)) - {"verbose"}
        written = {re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line)[1] for line in lines}
        assert understood == written | {"test-only"}, path


# ---------------------------------------------------------------- unchanged


def test_the_first_small_job(cluster, clone, submit, trained):
    """As the guide shows it, but for fewer epochs and a smaller model."""
    seen = cluster.run("bash", "-c", re.search("^sinfo .*$", GUIDE, re.MULTILINE)[0])
    assert seen.split("\n")[1].split() == ["gpu*", "2", "gpu:4", "256", "100000"]
    job = submit("01", *ONE).completed()
    assert job.epochs() == [1]
    assert re.search(r"^accuracy [\d.]+% \(\d+/359\)$", job.output, re.MULTILINE)
    assert same_bits(job.checkpoint, trained("01", *ONE))


@pytest.mark.weekly("each file once as it is: what differs from steps 1 and 4 are a few options")
@pytest.mark.parametrize("step", ["02", "03", "04", "05"])
def test_submitted_as_it_is(submit, trained, step):
    size = {"02": 2, "03": 2}.get(step, 8)
    job = submit(step, *ONE).completed()
    if size > 2:
        port = 20000 + job.number % 10000
        assert f"world size {size} on node[1-2], rendezvous at node1:{port}\n" in job.output
    assert job.epochs() == [1]
    assert same_bits(job.checkpoint, trained("03", *ONE, nprocs=size))


# ---------------------------------------------------------------- a job whose nodes fail

# In a copy of step 4, the ranks wait twice in each life of the job for a test to do something.
ASK = "            if step % 10 == 0 and self._stop_agreed():"
GATE = f"""\
            place = os.environ.get("SLURM_RESTART_COUNT", "0") + f"-{{step}}"
            if self.epochs_run == 0 and step in (15, 35):
                open(f"at-{{place}}", "w").close()
                while not (os.path.exists(f"go-{{place}}") or stop_signals):
                    time.sleep(0.01)
{ASK}"""


class Gated:
    """A job of step 4 with gates."""

    def __init__(self, clone, submit, *options):
        edit(clone / "04_multinode.py", ASK, GATE)
        self.folder, self.job = clone, submit("04", *TWO, options=options)

    def wait_at(self, life, step=15):
        self.job.wait_for((self.folder / f"at-{life}-{step}").exists)

    def go(self, life, step=15):
        (self.folder / f"go-{life}-{step}").touch()

    def go_on(self):
        """Open all gates."""
        for life in range(6):
            self.go(life)
            self.go(life, 35)


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
@pytest.mark.xdist_group("outlives")  # takes as long as the others together, mostly waiting
@pytest.mark.usefixtures("healed")
def test_a_job_outlives_all_of_this(cluster, clone, submit, trained):
    """Its cable is pulled for a while, its time is up, a node is cut off, another reboots.

    It ends with the weights of an undisturbed run.
    """
    gated = Gated(clone, submit, *ON_TWO_NODES)
    job = gated.job
    gated.wait_at(0)
    cluster.cable(2, "down")
    gated.go(0)
    time.sleep(4)
    assert not (clone / "at-0-35").exists()  # all ranks wait in the next collective ...
    cluster.cable(2, "up")
    gated.wait_at(0, 35)  # ... and go on

    move_the_limit(cluster, job)
    job.wait("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=9")
    assert "interrupted after 5,120 samples of the epoch" in job.output  # 40 steps of 2 x 64
    assert re.search(r"SignalException: Process \d+ got signal: 15", job.output)  # harmless

    # The node is switched off before it returns: then, Slurm cleans up the old run there, and has
    # been seen to kill the new one, whose step has the same number.
    gated.wait_at(1)
    assert not Path(f"{job.checkpoint}.interrupted").exists()
    cluster.cable(2, "down")
    gated.go(1)
    job.wait("PENDING", timeout=120)
    cluster.cut_the_power(2)
    cluster.cable(2, "up")
    cluster.switch_on(2)

    gated.wait_at(2)  # the first node runs the batch file, so Slurm requeues the job at once
    cluster.cut_the_power(1)
    cluster.switch_on(1)

    gated.go_on()
    job.completed()
    assert job.show("Restarts") == "3"
    assert job.output.count(f"resuming from {job.checkpoint.name} after epoch 0") == 3
    assert job.epochs() == [1, 2], job.output
    assert same_bits(job.checkpoint, trained("03", *TWO))


@pytest.mark.weekly("takes minutes, twice: Slurm gives up the lost task late")
@pytest.mark.parametrize("end", ["shut_down", "cut_the_power"])
@pytest.mark.usefixtures("healed")
def test_a_node_reboots_before_slurm_misses_it(cluster, clone, submit, trained, end):
    """Its task is lost: the other ranks fail, srun gives up, and Slurm does not requeue the job.

    After a shutdown, which closes the connections, srun would wait without end for that task.
    """
    edit(clone / BATCH["04"], "SLURM_WAIT=300", "SLURM_WAIT=5")
    gated = Gated(clone, submit, *ON_TWO_NODES)
    gated.wait_at(0)
    getattr(cluster, end)(2)
    cluster.switch_on(2)
    gated.go_on()  # at the latest, the next collective fails
    assert gated.job.wait(timeout=120) == "FAILED"
    assert "Timed out waiting for job step to complete" in gated.job.output
    assert gated.job.show("Restarts") == "0"
    again = submit("04", *TWO, options=ON_TWO_NODES).completed()
    assert same_bits(again.checkpoint, trained("03", *TWO))


@SLOW
def test_a_save_that_takes_too_long(clone, simple):
    """Longer than the batch file allows; this also shows that its setting takes effect."""
    edit(clone / BATCH["04"], "SHUTDOWN_TIMEOUT=60", "SHUTDOWN_TIMEOUT=2")
    slow = ("if told:\n", "if told:\n    time.sleep(15)\n")
    job = simple("04", *ON_NODE_1, go=False, change=slow)
    job.cancel("--signal=TERM")
    assert job.wait() == "FAILED", job.output
    assert "SignalException: Process" in job.output
    assert not Path(f"{job.checkpoint}.interrupted").exists()


@SLOW
def test_an_exception_on_one_rank_of_one_node(simple):
    """The other, which would wait for ever, ends too, and the job is not requeued."""
    bad = ("while not told", 'assert rank != "1", "the first cause"\nwhile True')
    job = simple("04", *ON_TWO_NODES, go=False, change=bad)
    assert job.wait() == "FAILED", job.output
    assert "AssertionError: the first cause" in job.output
    assert job.show("Restarts") == "0"


# ---------------------------------------------------------------- requeued, or not

LEAVES_IT = """\
if "SLURM_RESTART_COUNT" in os.environ:
    open(f"{path}.interrupted", "x").close()
if told:
"""


@SLOW
def test_a_train_py_of_your_own(clone, simple):
    """It is requeued when it has failed and left the file, and not when it has succeeded."""
    old, new = re.search(r"^```diff\n-(.*\n)\+(.*\n)```", GUIDE, re.MULTILINE).groups()
    edit(clone / BATCH["04"], old, new)
    options = (*ON_NODE_1, "--job-name=own")
    job = simple("04", *options, go=False, change=("if told:\n", LEAVES_IT), name="train.py")
    job.cancel("--signal=TERM")
    job.wait("PENDING")
    (clone / "go").touch()
    job.completed()
    assert (job.show("Restarts"), job.checkpoint.name) == ("1", "own.pt")
    assert Path(f"{job.checkpoint}.interrupted").exists()


@SLOW
def test_a_chain_and_a_cancelled_job(cluster, simple):
    """The first of two jobs is told to stop, and the second goes on; cancelled, it stays so."""
    job = simple("04", *ON_NODE_1, "--array=1-2%1", go=False)
    number, file = job.number, Path(f"{job.checkpoint}.interrupted")
    job.number = f"{number}_1"
    job.cancel("--signal=TERM")
    assert job.wait() == "FAILED"
    job.number = f"{number}_2"
    logs = job.folder.glob
    job.wait_for(lambda: sum("finds" in path.read_text() for path in logs("*.out")) == 2)
    assert not file.exists()
    job.cancel()
    assert job.wait() == "CANCELLED"
    cluster.wait_until_idle()  # by then, the batch file has ended
    assert file.exists()
    assert (job.wait(), job.show("Restarts")) == ("CANCELLED", "0")


@SLOW
def test_srun_alone(cluster, alone, simple):
    """It finds what torchrun would set, saves and requeues itself in the same way."""
    job = simple(alone, *TWO_BY_TWO, go=False)
    job.wait_for(lambda: job.output.count("finds 4 1 0,1\n") == 4)
    job.cancel("--signal=TERM")
    job.wait("PENDING")
    (job.folder / "go").touch()
    job.completed()
    assert job.show("Restarts") == "1"
    assert job.output.count("finds") == 8
    assert not Path(f"{job.checkpoint}.interrupted").exists()


@pytest.mark.weekly("trains as with torchrun; what the batch file does is shown without training")
def test_srun_alone_trains(alone, submit, trained):
    job = submit(alone, *ONE, options=TWO_BY_TWO).completed()
    assert same_bits(job.checkpoint, trained("03", *ONE, nprocs=4))


# ---------------------------------------------------------------- does not start


def test_what_is_refused(cluster, clone, submit, tmp_path_factory):
    """Each with the message that the lookup table quotes."""
    for option, said in (
        ("--gpus-per-node=5", "Requested node configuration is not available"),
        ("--mem=200G", "Memory specification can not be satisfied"),
        ("--gpus-per-task=1", "requested number of tasks per node differ from --ntasks-per-node"),
    ):
        words = f"sbatch --gpus-per-node=2 {option} {BATCH['04']} 2>&1 || true"
        assert said in cluster.run("bash", "-c", words, cwd=clone)

    elsewhere = submit(clone / BATCH["01"], folder=tmp_path_factory.mktemp("elsewhere"))
    taken = submit("04", options=(*ON_NODE_1, "--hold"))
    port = taken.lose_its_port()
    expected = {
        elsewhere: ".venv/bin/activate: No such file or directory",
        taken: f"port {port} of node1 is already in use",
    }
    images = re.search(r"^```bash\n(apptainer .*)\n(--container.*)\n```", GUIDE, re.M).groups()
    for words, said in zip(images, ("error: execve(): apptainer: No such file", "unrecognized")):
        shutil.copy(ROOT / BATCH["04"], clone / BATCH["04"])
        edit(clone / BATCH["04"], "--cpu-bind=cores", f"--cpu-bind=cores {words}")
        expected[submit("04", options=ON_NODE_1)] = said
    for job, said in expected.items():
        assert job.wait() == "FAILED"
        assert said in job.output

    hosts = cluster.folder / "hosts"
    text = hosts.read_text(encoding="utf-8")
    try:
        hosts.write_text(text.replace("node1\n", "other\n"), encoding="utf-8")
        job = submit("04", options=ON_NODE_1)
        assert job.wait() == "FAILED"
    finally:
        hosts.write_text(text, encoding="utf-8")
    assert "host 'node1' cannot be resolved" in job.output


# ---------------------------------------------------------------- ways to ask for nodes and GPUs


@SLOW
def test_a_node_runs_as_many_processes_as_it_has_gpus(cluster, alone, clone, simple, monkeypatch):
    """And each process sees all of them, with its share of the CPUs as threads."""
    monkeypatch.delitem(cluster.environment, "OMP_NUM_THREADS")
    spawns = SIMPLE.replace("sys.argv[1]", "sys.argv[2]").replace('os.environ["RANK"]', '"0"')
    spawns = f"import os\nos.environ['WORLD_SIZE'] = 'none'\n{spawns}"
    (clone / "02_multigpu_spawn.py").write_text(spawns, encoding="utf-8")
    for step, options, found in (
        ("02", ["--exclusive"], ["none 9 0,1,2,3"]),
        ("04", [*ON_NODE_1, "--gpus-per-node=2", "--exclusive"], ["4 18 0,1,2,3"] * 4),
        ("04", [*ON_NODE_1, "--gpus-per-node=2", "--gpus-per-task=2", "--cpus-per-task=4"],
         ["2 2 0,1"] * 2),
        (alone, ["--exclusive", "--gpus-per-node=2"], ["8 18 0,1,2,3"] * 8),
        (alone, ["--gres=gpu:2"], ["4 36 0,1"] * 4),
        (alone, ["--gpus-per-task=1", "--ntasks-per-node=2", "--gpus-per-node=2",
                 "--cpus-per-task=18"], ["4 9 0", "4 9 0", "4 9 1", "4 9 1"]),
    ):  # fmt: skip
        output = simple(step, *options).completed().output
        assert sorted(re.findall(r"^finds (.*)$", output, re.MULTILINE)) == found, output


@SLOW
def test_nodes_with_different_numbers_of_gpus(cluster, clone, submit):
    """Slurm spreads three GPUs over two nodes; the last command starts a process for each."""
    edit(clone / BATCH["04"], "--gpus-per-node=4", "--gpus=3")
    job = submit("04")
    assert job.wait() == "FAILED"
    refused = "Invalid generic resource (gres) specification"
    assert f"srun: error: Unable to create step for job {job.number}: {refused}" in job.output
    launch = re.search(r"`(srun bash -c 'torchrun .*?) \.\.\.'`", GUIDE)[1]
    launch += " --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29400 --no-python bash -c "
    launch += '"echo finds \\$WORLD_SIZE \\$CUDA_VISIBLE_DEVICES"\''
    words = ["--nodes=2", "--ntasks-per-node=1", "--gpus=3", "bash", "-c"]
    output = cluster.run("salloc", *words, f"source .venv/bin/activate; {launch}", cwd=clone)
    found = sorted(re.findall("^finds (.*)$", output, re.MULTILINE))
    assert found == ["3 0", "3 0,1", "3 0,1"]


@SLOW
def test_by_hand(cluster, clone):
    """Run the commands that the guide shows for salloc."""
    (clone / "04_multinode.py").write_text(SIMPLE, encoding="utf-8")
    (clone / "go").touch()
    allocate, launch = re.search(r"^(salloc .*)\n((?:.*\n)*?)```", GUIDE, re.MULTILINE).groups()
    launch = launch.replace("04_multinode.py", "04_multinode.py path=run")
    output = cluster.run(*allocate.split(), "bash", "-c", launch, cwd=clone)
    assert output.count("finds 4 1 0,1\n") == 4


@SLOW
def test_two_jobs_at_once_on_one_node(simple, submit):
    a = simple("04", *ON_NODE_1, "--job-name=a", go=False)
    b = submit("04", options=(*ON_NODE_1, "--job-name=b"))
    b.wait_for(Path(f"{b.checkpoint}.waiting-0").exists)
    assert a.show("JobState") == b.show("JobState") == "RUNNING"
    (a.folder / "go").touch()
    for job in (a, b):
        assert "world size 1 on node1" in job.completed().output


@SLOW
@pytest.mark.skipif(not shutil.which("ch-run"), reason="apt-get install charliecloud-runtime")
def test_in_a_container(cluster, clone, simple, monkeypatch):
    """Charliecloud takes any folder as an image; this one holds only what is bound into it."""
    monkeypatch.setitem(cluster.environment, "USER", "root")  # ch-run needs it
    monkeypatch.delitem(cluster.environment, "TMPDIR")  # ch-run would mount it as /tmp
    image = clone / "image"
    bound = sorted({"/usr", sys.base_prefix, sys.prefix, str(clone)})
    for name in ["/dev", "/etc", "/proc", "/sys", "/tmp", *bound]:
        (image / name[1:]).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("group", "hosts", "passwd", "resolv.conf"):  # ch-run binds the node's there
        (image / "etc" / name).touch()
    options = [f"--bind={name}" for name in bound]
    words = shlex.join(["ch-run", *options, f"--cd={clone}", str(image), "--"])
    edit(clone / BATCH["04"], "--cpu-bind=cores", f"--cpu-bind=cores {words}")
    look = (
        "told = []\n",
        "told = []\nos.write(1, f\"in {sorted(os.listdir('/etc'))}\\n\".encode())\n",
    )
    job = simple("04", "--nodes=2", "--gres=gpu:1", change=look).completed()
    assert job.output.count("finds 2 ") == 2
    assert job.output.count(f"in {['group', 'hosts', 'passwd', 'resolv.conf']}\n") == 2


@pytest.mark.weekly("takes minutes: it trains dozens of times")
def test_scaling_over_nodes(submit):
    quick = ("--repeats=1", "--epochs=2", "--width=4", "--batch-size=256")
    job = submit("slurm/scaling.sbatch", *quick, options=("--gpus-per-node=1",))
    job.completed(timeout=300)
    measured = re.findall(r"^\| (weak|strong) \| (\d) \| (\d+) \|", job.output, re.MULTILINE)
    sizes = {("strong", "1", "512"), ("strong", "2", "256")}
    assert set(measured) == sizes | {("weak", "1", "256"), ("weak", "2", "256")}
    assert (job.folder / "scaling.json").exists()
