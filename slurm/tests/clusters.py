"""Batch files on a Slurm cluster that the tests start. conftest.py imports the fixtures."""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from practice.cluster import Cluster, missing
from support.jobs import environment
from support.scripts import ROOT, SCRIPTS

ON_A_CLUSTER = pytest.mark.skipif(bool(missing()), reason=str(missing()))
BATCH = {path.name[:2]: f"slurm/{path.stem}.sbatch" for path in SCRIPTS}
ON_NODE_1 = ("--nodes=1", "--nodelist=node1", "--gpus-per-node=1")
ON_TWO_NODES = ("--nodes=2", "--gpus-per-node=1")
TWO_BY_TWO = ("--nodes=2", "--gpus-per-node=2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}

# Tests of the launcher run this script in place of a step. It prints what it finds, and waits for
# SIGTERM or for the file `go`.
SIMPLE = """\
import os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
names = "WORLD_SIZE", "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES"
os.write(1, f"finds {' '.join(os.environ.get(name, '-') for name in names)}\\n".encode())
while not told and not os.path.exists("go"):
    time.sleep(0.05)
if told:
    os.write(1, b"told\\n")
    checkpoint = sys.argv[-1].partition("=")[2]
    for name in (checkpoint, f"{checkpoint}.interrupted"):
        open(name, "w").close()
    sys.exit(1)
"""


def in_the_guide(pattern):
    """Return what the groups of a pattern match in the guide."""
    guide = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    found = re.search(pattern, guide, re.MULTILINE).groups()
    return found if len(found) > 1 else found[0]


@pytest.fixture(scope="session")
def cluster():
    """Return a cluster, one for each worker of pytest-xdist. All users can read its folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        with Cluster(folder, environment=environment()) as cluster:
            yield cluster


def clone_into(folder):
    """Copy the repository, with a virtual environment like a reader's."""
    for name in ("slurm", "more/benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in SCRIPTS:
        shutil.copy(path, folder)
    (folder / ".venv" / "bin").mkdir(parents=True)
    activate = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    (folder / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")
    return folder


@pytest.fixture
def clone(tmp_path):
    return clone_into(tmp_path)


class Submitted:
    """A job in the queue."""

    def __init__(self, cluster, folder, *words):
        self.cluster, self.folder = cluster, folder
        self.number = int(cluster.run("sbatch", "--parsable", *words, cwd=folder))

    @property
    def stdout(self):
        """What the job has printed, errors included."""
        found = list(self.folder.glob(f"*_{self.number}[_.]*out"))
        return found[0].read_text(encoding="utf-8") if found else ""

    @property
    def checkpoint(self):
        return self.folder / f"{self.show('JobName')}.pt"

    @property
    def interrupted(self):
        """Whether the file is there for which the batch file requeues the job."""
        return Path(f"{self.checkpoint}.interrupted").exists()

    def show(self, name):
        shown = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        return re.search(rf"\b{name}=(\S*)", shown)[1]

    def cancel(self, *words):
        """Cancel the job or, with --signal=TERM, tell it to stop."""
        self.cluster.run("scancel", *words, self.number)

    def wait_for(self, ready, timeout=300):
        """Wait until `ready()` is true; return the result."""
        end = time.monotonic() + timeout
        while not (result := ready()):
            state = self.show("JobState")
            late = state in ENDED or time.monotonic() > end
            assert ready() or not late, f"job {self.number} is {state}:\n{self.stdout}"
            time.sleep(0.2)
        return result

    def becomes(self, state):
        """Wait until the job is in this state; fail if it ends in another one. Return the job."""
        self.wait_for(lambda: self.show("JobState") == state)
        return self


@pytest.fixture
def submit(cluster, clone):
    """Submit a batch file from the clone; cancel any jobs that are left at the end."""
    jobs = []

    def submit(step, *arguments, options=(), folder=clone):
        jobs.append(Submitted(cluster, folder, *options, BATCH.get(step, step), *arguments))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.cancel()
    cluster.wait_until_idle()


@pytest.fixture
def simple(clone, submit):
    """Submit a step in a clone whose step 4 is SIMPLE; it goes on at once unless `go` is false."""
    (clone / "04_multinode.py").write_text(SIMPLE, encoding="utf-8")

    def submit_simple(step, *options, go=True, arguments=()):
        if go:
            (clone / "go").touch()
        job = submit(step, *arguments, options=options)
        job.wait_for(lambda: go or found(job))
        return job

    return submit_simple


def found(job):
    """Return what the ranks of a job with SIMPLE have found."""
    return sorted(re.findall(r"^finds (.*)$", job.stdout, re.MULTILINE))


def second_launcher(text):
    """Return the text of step 4's batch file with the guide's lines for one task per GPU."""
    lines = in_the_guide(r'^(unset SLURM_GPUS_PER_TASK (?s:.*?)"\$checkpoint"\n)```')
    return text.replace(re.search(r"^srun .*\\\n(?: .*\n)+", text, re.MULTILINE)[0], lines)


@pytest.fixture
def alone(clone):
    """A copy of step 4's batch file that starts one task per GPU."""
    text = second_launcher((clone / BATCH["04"]).read_text(encoding="utf-8"))
    text = text.replace("train.py", "04_multinode.py").replace('--output="', '--checkpoint-path="')
    (clone / "alone.sbatch").write_text(text, encoding="utf-8")
    return "alone.sbatch"
