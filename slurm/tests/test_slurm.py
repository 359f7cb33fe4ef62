"""The batch files, submitted to a real Slurm cluster whose nodes really fail."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from clusters import BATCH, ON_A_CLUSTER, ON_TWO_NODES, TWO_BY_TWO, Submitted
from practice.cluster import Cluster
from support.jobs import environment
from support.results import same_bits
from support.scripts import LONG, ROOT, SCRIPT, SCRIPTS, SMALL, edit, exact

FILES = sorted((ROOT / "slurm").glob("*.sbatch"))
SLOW = pytest.mark.slow
AGAIN = pytest.mark.weekly
ON_NODE_1 = ("--nodes=1", "--nodelist=node1")

ONE = ("1", *SMALL)

# This script replaces a step, and prints what it finds.
LOOK = """\
import os, sys
size = os.environ.get("WORLD_SIZE") or sys.argv[1]
found = [size, os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]]
os.write(1, f"finds {' '.join(found)}\\n".encode())
"""

pytestmark = ON_A_CLUSTER


@pytest.fixture
def looking(cluster, clone, submit, monkeypatch):
    """Return a function that submits a step in a copy that only looks at its environment.

    It returns what each process found: the number of processes, its threads and its GPUs.
    """
    monkeypatch.delitem(cluster.environment, "OMP_NUM_THREADS")
    for path in SCRIPTS:
        (clone / path.name).write_text(LOOK, encoding="utf-8")

    def look(step, *options):
        output = submit(step, options=options).completed().output
        return sorted(re.findall(r"^finds (.*)$", output, re.MULTILINE))

    return look


def values(cluster, node, variable):
    """Return the set of values of a variable in the environments of a node's processes."""
    found = f"grep -azhE ^{variable}= /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n'"
    lines = cluster.run("bash", "-c", found, node=node).splitlines()
    return {line.split("=", 1)[1] for line in lines}


# ---------------------------------------------------------------- unchanged


@pytest.mark.parametrize("step", [pytest.param(n, marks=() if n == "04" else AGAIN) for n in BATCH])
def test_submitted_as_it_is(submit, trained, step):
    """Step 4, whose file is that of step 5, runs on two GPUs per node to save time."""
    size = {"01": 1, "02": 2, "03": 2, "04": 4, "05": 8}[step]
    job = submit(step, *ONE, options=TWO_BY_TWO if step == "04" else ()).completed()
    if size > 2:
        port = 20000 + job.number % 10000
        assert f"world size {size} on node[1-2], rendezvous at node1:{port}\n" in job.output
    assert job.epochs() == [1]
    assert re.search(r"^accuracy [\d.]+% \(\d+/359\)$", job.output, re.MULTILINE)
    assert same_bits(job.checkpoint, trained("01" if step == "01" else "03", *ONE, nprocs=size))


def test_steps_4_and_5_differ_in_their_names():
    texts = [(ROOT / BATCH[step]).read_text(encoding="utf-8") for step in ("04", "05")]
    assert texts[0].replace("04_multinode", "05_gather_eval") == texts[1]


def ranks(cluster):
    """Return the set of ranks on each node."""
    found = [{int(value) for value in values(cluster, node, "RANK")} for node in (1, 2)]
    return sorted(found, key=min)


@pytest.fixture
def alone(clone):
    """A copy of step 4's batch file with its second launcher, outside of slurm/."""
    text = (clone / BATCH["04"]).read_text(encoding="utf-8")
    comment = re.search(r"^# launch=.*\n(#     .*\n)+", text, re.MULTILINE)[0]
    text = text.replace(comment, re.sub("^# ", "", comment, flags=re.MULTILINE))
    (clone / "alone.sbatch").write_text(text, encoding="utf-8")
    return "alone.sbatch"


@SLOW
def test_srun_alone(cluster, alone, gated, trained_with):
    job = gated(*TWO_BY_TWO, step=alone, changes=exact(4))
    assert ranks(cluster) == [{0, 1}, {2, 3}]
    assert not values(cluster, 1, "TORCHELASTIC_RUN_ID")
    cluster.run("scancel", "--signal=TERM", job.number)
    job.wait_for(lambda: stopped(job.output, 4))
    job.open_the_gate()
    job.completed()
    went_on(job, trained_with, 4)


@pytest.mark.weekly
def test_two_jobs_at_once_on_one_node(gated, submit, trained):
    options = (*ON_NODE_1, "--gpus-per-node=2")
    a = gated(*options, "--job-name=a")
    b = submit("04", *LONG, options=(*options, "--job-name=b")).wait_at_the_gate()
    assert a.show("JobState") == b.show("JobState") == "RUNNING"
    a.open_the_gate()
    for job in (a, b):
        assert "world size 2 on node1" in job.completed().output
        assert same_bits(job.checkpoint, trained("03", *LONG))


@SLOW
def test_by_hand(cluster, clone, trained):
    """Run the commands that the guide shows for salloc."""
    guide = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    allocate, launch = re.search(r"^(salloc .*)\n((?:.*\n)*?)```", guide, re.MULTILINE).groups()
    launch = launch.replace("04_multinode.py", f"04_multinode.py {' '.join(ONE)}")
    assert "accuracy" in cluster.run(*allocate.split(), "bash", "-c", launch, cwd=clone)
    assert same_bits(clone / "checkpoint.pt", trained("03", *ONE, nprocs=4))


@SLOW
def test_threads_follow_the_cpus_of_the_job(looking):
    assert looking("02", "--cpus-per-task=6") == ["--nprocs=2 3 0,1"]
    assert looking("04", *ON_NODE_1, "--gpus-per-node=2", "--cpus-per-task=4") == ["2 2 0,1"] * 2


@pytest.mark.weekly
def test_scaling_over_nodes(submit):
    quick = ("--repeats=1", "--epochs=2", "--width=4", "--batch-size=256")
    job = submit("slurm/scaling.sbatch", *quick, options=("--gpus-per-node=1",))
    job.completed(timeout=300)
    measured = re.findall(r"^\| (weak|strong) \| (\d) \| (\d+) \|", job.output, re.MULTILINE)
    assert sorted(measured) == [
        ("strong", "1", "512"),
        ("strong", "2", "256"),
        ("weak", "1", "256"),
        ("weak", "2", "256"),
    ]
    assert (job.folder / "scaling.json").exists()


# ---------------------------------------------------------------- told to stop


def stopped(output, ranks=2):
    """Return whether a gated job stopped after 20 steps of 64 samples per rank, as it should."""
    return f"interrupted after {ranks * 20 * 64:,} samples of the epoch" in output


def went_on(job, trained_with, ranks=2):
    """Check that a stopped job resumed, ran no epoch twice, and ended like an undisturbed one."""
    assert stopped(job.output, ranks)
    assert "resuming from 04_multinode.pt after epoch 1" in job.output
    assert job.epochs() == [1, 2, 3, 4], job.output
    assert job.show("Restarts") == "1"
    assert not Path(f"{job.checkpoint}.interrupted").exists()
    assert same_bits(job.checkpoint, trained_with("03", exact(ranks), LONG, nprocs=ranks))


@SLOW
def test_told_to_stop_it_requeues_itself(cluster, gated, trained_with):
    job = gated(*TWO_BY_TWO, changes=exact(4))
    assert ranks(cluster) == [{0, 1}, {2, 3}]
    assert values(cluster, 1, "TORCHELASTIC_RUN_ID")
    cluster.run("scancel", "--signal=TERM", job.number)
    job.wait_for(lambda: stopped(job.output, 4))
    job.open_the_gate()
    job.completed()
    assert re.search(r"SignalException: Process \d+ got signal: 15", job.output)  # harmless
    went_on(job, trained_with, 4)


@SLOW
def test_at_the_end_of_its_time(cluster, gated, trained_with):
    """The limit is moved nearer, which is the same to Slurm: it looks at the clock every 30 s."""
    job = gated(*ON_TWO_NODES)
    hours, minutes, seconds = map(int, job.show("RunTime").split(":"))
    near = 60 * hours + minutes + (1 if seconds < 30 else 2)  # 30 to 90 seconds are left
    cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={near}")
    job.wait("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")
    job.open_the_gate()
    job.completed()
    went_on(job, trained_with)


@SLOW
def test_a_save_that_takes_too_long(cluster, clone, gated):
    """Longer than the batch file allows; this also shows that its setting takes effect."""
    slow = "        os.replace("
    edit(clone / "04_multinode.py", slow, f"        time.sleep(15 * self.interrupted)\n{slow}")
    edit(clone / BATCH["04"], "SHUTDOWN_TIMEOUT=60", "SHUTDOWN_TIMEOUT=3")
    job = gated(*ON_TWO_NODES)
    cluster.run("scancel", "--signal=TERM", job.number)
    assert job.wait() == "FAILED", job.output
    assert "SignalException: Process" in job.output
    assert "interrupted after" not in job.output
    assert Path(f"{job.checkpoint}.new").exists()


@pytest.mark.parametrize("step", ["04", "05"])
def test_torchrun_kills_before_slurm_does(step):
    text = (ROOT / BATCH[step]).read_text(encoding="utf-8")
    warned = int(re.search(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)[1])
    allowed = int(re.search(r"^export TORCH_\w+_SHUTDOWN_TIMEOUT=(\d+)$", text, re.MULTILINE)[1])
    assert 30 < allowed < warned  # 30 is torchrun's default


@SLOW
def test_cancelled_it_stays_cancelled(cluster, gated, submit, trained):
    job = gated(*ON_TWO_NODES)
    cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED"
    cluster.wait_until_idle()  # by then, the batch file has ended
    assert stopped(job.output)
    assert (job.show("JobState"), job.show("Restarts")) == ("CANCELLED", "0")
    job.open_the_gate()
    again = submit("04", *LONG, options=ON_TWO_NODES).completed()
    assert "resuming from 04_multinode.pt after epoch 1" in again.output
    assert job.epochs() + again.epochs() == [1, 2, 3, 4]
    assert same_bits(again.checkpoint, trained("03", *LONG))


@SLOW
def test_a_chain(cluster, clone, gated, trained):
    """The first of two jobs is told to stop, and the second finishes the training run."""
    job = gated(*ON_TWO_NODES, "--array=1-2%1")
    cluster.run("scancel", "--signal=TERM", f"{job.number}_1")
    assert cluster.wait(f"{job.number}_1") == "FAILED"
    job.open_the_gate()
    assert cluster.wait(f"{job.number}_2") == "COMPLETED"
    texts = [path.read_text(encoding="utf-8") for path in clone.glob("*.out")]
    first, second = sorted(texts, key=stopped, reverse=True)
    assert stopped(first)
    assert "resuming from 04_multinode.pt after epoch 1" in second
    assert same_bits(job.checkpoint, trained("03", *LONG))


# ---------------------------------------------------------------- failing


@pytest.fixture
def healed(cluster):
    """Restore the second node after the test."""
    yield
    cluster.cable(2, "up")
    with contextlib.suppress(subprocess.CalledProcessError):
        cluster.cut_the_power(2)
    cluster.switch_on(2)
    cluster.wait_until_idle(timeout=120)


def restarted(job, trained):
    """Check that a job that Slurm has requeued resumes and ends like an undisturbed one."""
    job.open_the_gate()
    job.completed(timeout=300)
    assert job.show("Restarts") == "1"
    assert job.epochs() == [1, 2, 3, 4]
    assert same_bits(job.checkpoint, trained("03", *LONG))


@SLOW
@pytest.mark.usefixtures("healed")
def test_a_node_loses_its_power(cluster, gated, trained):
    """Slurm marks the node down, and starts the job again once there are enough nodes."""
    job = gated(*ON_TWO_NODES)
    cluster.cut_the_power(2)
    job.wait("PENDING", timeout=120)
    cluster.switch_on(2)
    restarted(job, trained)


@pytest.mark.weekly
@pytest.mark.parametrize("end", ["shut_down", "cut_the_power"])
@pytest.mark.usefixtures("healed")
def test_a_node_reboots_before_slurm_misses_it(cluster, clone, gated, submit, trained, end):
    """Its task is lost: the other ranks fail, srun gives up, and Slurm does not requeue the job.

    After a shutdown, which closes the connections, srun would wait without end for that task.
    """
    edit(clone / BATCH["04"], "SLURM_WAIT=300", "SLURM_WAIT=5")
    job = gated(*ON_TWO_NODES)
    getattr(cluster, end)(2)
    cluster.switch_on(2)
    job.open_the_gate()  # at the latest, the next collective fails
    assert job.wait(timeout=120) == "FAILED"
    assert "Timed out waiting for job step to complete" in job.output
    assert job.show("Restarts") == "0"
    again = submit("04", *LONG, options=ON_TWO_NODES).completed()
    assert job.epochs() + again.epochs() == [1, 2, 3, 4]
    assert same_bits(again.checkpoint, trained("03", *LONG))


@SLOW
def test_the_first_node_reboots_before_slurm_misses_it(cluster, gated, trained):
    """That node ran the batch file, so Slurm requeues the job at once."""
    job = gated(*ON_TWO_NODES)
    cluster.cut_the_power(1)
    cluster.switch_on(1)
    restarted(job, trained)


@SLOW
@pytest.mark.usefixtures("healed")
def test_a_cable_is_pulled_for_good(cluster, gated, trained):
    """The node must be restarted before it returns.

    When a node returns, Slurm cleans up the old run there, and has been seen to kill the new one,
    whose step has the same number.
    """
    job = gated(*ON_TWO_NODES)
    cluster.cable(2, "down")
    job.open_the_gate()
    job.wait("PENDING", timeout=120)
    cluster.cut_the_power(2)
    cluster.cable(2, "up")
    cluster.switch_on(2)
    restarted(job, trained)


@SLOW
@pytest.mark.usefixtures("healed")
def test_a_cable_is_pulled_for_a_while(cluster, gated, trained):
    job = gated(*ON_TWO_NODES)
    cluster.cable(2, "down")
    job.open_the_gate()
    time.sleep(4)
    assert job.epochs() == [1]
    cluster.cable(2, "up")
    job.completed()
    assert job.show("Restarts") == "0"
    assert job.epochs() == [1, 2, 3, 4]
    assert same_bits(job.checkpoint, trained("03", *LONG))


@SLOW
def test_an_exception_on_one_rank_of_one_node(clone, submit):
    line = "        self.optimizer.step()\n"
    bad = f"{line}        assert dist.get_rank() != 1, 'the first cause'\n"
    edit(clone / "04_multinode.py", line, bad)
    job = submit("04", *ONE, options=ON_TWO_NODES)
    assert job.wait() == "FAILED", job.output
    assert "AssertionError: the first cause" in job.output
    reports = job.output.split(" FAILED\n")[1:]
    assert any("AssertionError: the first cause" in report for report in reports), job.output
    assert job.show("Restarts") == "0"


@SLOW
def test_submitted_from_another_folder(clone, submit, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    job = submit(clone / BATCH["01"], folder=elsewhere)
    assert job.wait() == "FAILED"
    assert ".venv/bin/activate: No such file or directory" in job.output


@SLOW
def test_a_host_that_has_no_name(cluster, submit):
    hosts = cluster.folder / "hosts"
    text = hosts.read_text(encoding="utf-8")
    try:
        hosts.write_text(text.replace("node1\n", "other\n"), encoding="utf-8")
        job = submit("04", options=ON_NODE_1)
        assert job.wait() == "FAILED"
    finally:
        hosts.write_text(text, encoding="utf-8")
    assert "host 'node1' cannot be resolved" in job.output


@SLOW
def test_a_port_that_is_taken(cluster, submit):
    job = submit("04", options=(*ON_NODE_1, "--hold"))
    port = 20000 + job.number % 10000
    listen = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(120)"
    start = f'"{sys.executable}" -c "{listen}" > /dev/null 2>&1 & echo $!'
    listener = cluster.run("bash", "-c", start, node=1).strip()
    until = f"until (: < /dev/tcp/node1/{port}) 2> /dev/null; do sleep 0.1; done"
    cluster.run("bash", "-c", until, node=1)
    cluster.run("scontrol", "release", job.number)
    assert job.wait() == "FAILED"
    cluster.run("kill", listener, node=1)
    assert f"port {port} of node1 is already in use" in job.output


def by_hand(cluster, folder, launch, gpus="--gpus-per-node=2"):
    """Submit one command on two nodes; return the job's state and its output."""
    options = ["--nodes=2", "--ntasks-per-node=1", gpus, "--output=out"]
    line = f"export PATH={Path(sys.executable).parent}:$PATH; {launch}"
    job = cluster.sbatch(*options, f"--wrap={line}", cwd=folder)
    return cluster.wait(job), (folder / "out").read_text(encoding="utf-8")


@SLOW
@pytest.mark.parametrize(
    "launch",
    [
        "torchrun --nnodes=2 --rdzv-endpoint=node1:29400",
        "srun torchrun --nnodes=2 --rdzv-endpoint=localhost:29400",
    ],
    ids=["without srun", "localhost"],
)
def test_agents_that_do_not_meet(cluster, tmp_path, launch):
    options = "--nproc-per-node=2 --rdzv-backend=c10d --rdzv-conf=join_timeout=5"
    state, output = by_hand(cluster, tmp_path, f"{launch} {options} {SCRIPT['04']} 1")
    assert state == "FAILED"
    assert "RendezvousTimeoutError" in output
    assert "epoch" not in output


@pytest.mark.weekly
def test_one_job_of_two_nodes_is_two_of_one(cluster, tmp_path):
    """Each has its own checkpoint; with one, the slower node would find nothing to do."""
    train = f"{SCRIPT['04']} {' '.join(ONE)} --checkpoint-path=$SLURMD_NODENAME.pt"
    launch = f"srun bash -c 'torchrun --standalone --nproc-per-node=1 {train}'"
    state, output = by_hand(cluster, tmp_path, launch)
    assert state == "COMPLETED", output
    assert output.count("epoch 1 ") == output.count("accuracy") == 2


# ---------------------------------------------------------------- what differs between clusters


@SLOW
@pytest.mark.parametrize(
    ("step", "options", "found"),
    [
        ("02", ["--exclusive"], ["--nprocs=4 9 0,1,2,3"]),
        ("04", ["--exclusive", *ON_NODE_1, "--gpus-per-node=2"], ["4 18 0,1,2,3"] * 4),
        ("04", [*ON_NODE_1, "--gpus-per-node=2", "--gpus-per-task=2"], ["2 36 0,1"] * 2),
        ("alone.sbatch", ["--exclusive", "--gpus-per-node=2"], ["8 18 0,1,2,3"] * 8),
        ("alone.sbatch", ["--gres=gpu:2"], ["4 36 0,1"] * 4),
    ],
)
@pytest.mark.usefixtures("alone")
def test_ways_to_ask_for_gpus(looking, step, options, found):
    """A node runs as many processes as it has GPUs, and each process sees all of them."""
    assert looking(step, *options) == found


@SLOW
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpus-per-node=5", "Requested node configuration is not available"),
        ("--mem=200G", "Memory specification can not be satisfied"),
        ("--gpus-per-task=1", "requested number of tasks per node differ from --ntasks-per-node"),
    ],
)
def test_refused_by_sbatch(cluster, clone, option, said):
    submit = f"sbatch --gpus-per-node=2 {option} {BATCH['04']} 2>&1 || true"
    assert said in cluster.run("bash", "-c", submit, cwd=clone)
    there = cluster.run("sinfo", "-h", "-o", "%P %G %c %m")
    assert there.split() == ["gpu*", "gpu:4", "256", "100000"]


@SLOW
def test_gpus_bound_to_tasks(alone, looking):
    """With one task per process, each process sees only its own GPU."""
    bound = ["--gpus-per-task=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=18"]
    assert looking(alone, *bound) == ["4 9 0", "4 9 0", "4 9 1", "4 9 1"]


@SLOW
def test_nodes_with_different_numbers_of_gpus(cluster, clone, submit, tmp_path_factory):
    """Slurm spreads three GPUs over two nodes; the last command starts a process for each."""
    edit(clone / BATCH["04"], "--gpus-per-node=4", "--gpus=3")
    job = submit("04")
    assert job.wait() == "FAILED"
    assert "world size 4 on node[1-2]" in job.output
    refused = "Invalid generic resource (gres) specification"
    assert f"srun: error: Unable to create step for job {job.number}: {refused}" in job.output
    (clone / "look.py").write_text(LOOK, encoding="utf-8")
    launch = "srun bash -c 'torchrun --nproc-per-node=$SLURM_GPUS_ON_NODE --nnodes=2"
    launch = f"{launch} --rdzv-backend=c10d --rdzv-endpoint=node1:29400 {clone}/look.py'"
    folder = tmp_path_factory.mktemp("by_hand")
    state, output = by_hand(cluster, folder, launch, gpus="--gpus=3")
    assert state == "COMPLETED", output
    found = sorted(re.findall("^finds (.*)$", output, re.MULTILINE))
    assert found == ["3 1 0", "3 1 0,1", "3 1 0,1"]


MEMORY = Path("/sys/fs/cgroup/memory")  # where a kernel has cgroups v1


class Strict(Cluster):
    """A cluster of one node that kills jobs that exceed the memory they asked for."""

    def _write_files(self):
        super()._write_files()
        self.group = MEMORY / uuid.uuid4().hex
        self.group.mkdir()
        inside = self.folder / "cgroup" / "memory"
        inside.mkdir(parents=True)
        mount = f"hostname login\nmount --bind {self.group} {inside}\n"
        edit(self.folder / "controller.sh", "hostname login\n", mount)
        edit(self.folder / "slurm.conf", "task/none", "task/cgroup")
        edit(self.folder / "slurm.conf", "CR_Core", "CR_Core_Memory")
        limit = f"CgroupMountpoint={inside.parent}\nConstrainRAMSpace=yes\n"
        edit(self.folder / "cgroup.conf", "cgroup/v1\n", f"cgroup/v1\n{limit}")

    def __exit__(self, *error):
        super().__exit__(*error)
        for folder, _, _ in os.walk(self.group, topdown=False):
            os.rmdir(folder)


@SLOW
@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="needs cgroups v1")
def test_out_of_memory(clone, tmp_path_factory):
    """Slurm, torchrun and the kernel each report a rank that takes 2 GB more than the others."""
    train = "    trainer.train("
    take = "    taken = torch.ones(2**29) if dist.get_rank() == 1 else None\n"
    edit(clone / "04_multinode.py", train, f"{take}{train}")
    options = [*ON_NODE_1, "--gpus-per-node=2"]
    with Strict(tmp_path_factory.mktemp("strict"), nodes=1, environment=environment()) as strict:
        job = Submitted(strict, clone, BATCH["04"], "1", *SMALL, options=[*options, "--mem=1G"])
        job.wait("FAILED", "OUT_OF_MEMORY", "COMPLETED")
        kernel = strict.run("dmesg")
        assert f"error: Detected 1 oom-kill event(s) in StepId={job.number}.0" in job.output
        assert "srun: error: node1: task 0: Out Of Memory" in job.output
        assert "Signal 9 (SIGKILL) received by PID" in job.output
        assert f"/{strict.group.name}/" in kernel
        assert "Memory cgroup out of memory: Killed process" in kernel
        more = [*options, "--mem-per-gpu=3G"]
        job = Submitted(strict, clone, BATCH["04"], "1", *SMALL, options=more).completed()
        assert "accuracy" in job.output


@SLOW
@pytest.mark.skipif(not shutil.which("ch-run"), reason="apt-get install charliecloud-runtime")
def test_in_a_container(cluster, clone, gated, trained, monkeypatch):
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
    line = "# in_container=(apptainer exec --nv image.sif)"
    edit(clone / BATCH["04"], line, f"in_container=({words})")
    job = gated("--nodes=2", "--gres=gpu:1")
    assert ranks(cluster) == [{0}, {1}]
    roots = "for found in $(grep -alz ^RANK= */environ); do ls ${found%environ}root/etc; done"
    inside = cluster.run("bash", "-c", roots, node=1, cwd="/proc").split()
    assert set(inside) == {"group", "hosts", "passwd", "resolv.conf"}
    job.open_the_gate()
    job.completed()
    assert same_bits(job.checkpoint, trained("03", *LONG))


@SLOW
@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("# in_container=(apptainer", "error: execve(): apptainer: No such file or directory"),
        ("# in_container=(--", "srun: unrecognized option '--container-image=./image.sqsh'"),
    ],
    ids=["Apptainer", "Pyxis"],
)
def test_a_container_that_is_not_installed(clone, submit, start, said):
    """This also shows that srun gets the words of these lines in the right place."""
    edit(clone / BATCH["04"], start, start[2:])
    job = submit("04", options=ON_NODE_1)
    assert job.wait() == "FAILED"
    assert said in job.output


# ---------------------------------------------------------------- each line is read


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_read(cluster, path):
    """A misspelt #SBATCH would be a mere comment; sbatch -v prints the options that it has read."""
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.search("SBATCH *--", line)]
    lines.remove("##SBATCH --account=project")
    read = cluster.run("bash", "-c", f"sbatch -v --test-only {path} 2>&1")
    understood = set(re.findall(r"^sbatch: ([a-z-]+) +: ", read, re.MULTILINE)) - {"verbose"}
    written = {re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line)[1] for line in lines}
    assert understood == written | {"test-only"}


def test_the_lines_to_edit_are_the_same():
    """Except in scaling.sbatch, which has no container, as its program calls srun."""
    for path in FILES:
        if path.stem != "scaling":
            part = re.search(r"^# EDIT: .*?\n\n", path.read_text(encoding="utf-8"), re.M | re.S)[0]
            assert part.count("in_container=(") == 2
            assert part == re.search(r"^# EDIT: .*?\n\n", FILES[0].read_text(), re.M | re.S)[0]
