"""Batch files on a Slurm cluster that the tests start. conftest.py imports the fixtures."""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from practice.cluster import Cluster, missing
from support.jobs import environment
from support.scripts import ROOT, SCRIPTS

ON_A_CLUSTER = pytest.mark.skipif(bool(missing()), reason=str(missing()))
# These tests mostly wait: one worker of pytest-xdist has the cluster, while others compute.
ONE_CLUSTER = pytest.mark.xdist_group("slurm")
BATCH = {path.name[:2]: f"slurm/{path.stem}.sbatch" for path in SCRIPTS}
ON_TWO_NODES = ("--nodes=2", "--gpus-per-node=1")
TWO_BY_TWO = ("--nodes=2", "--gpus-per-node=2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), environment=environment()) as cluster:
        yield cluster


def clone_into(folder):
    """Copy the repository, with a virtual environment like a reader's."""
    for name in ("slurm", "benchmarks"):
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
    def output(self):
        found = list(self.folder.glob(f"*_{self.number}.out"))
        return found[0].read_text(encoding="utf-8") if found else ""

    @property
    def checkpoint(self):
        return self.folder / f"{self.show('JobName')}.pt"

    def show(self, name):
        shown = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        return re.search(rf"\b{name}=(\S*)", shown)[1]

    def cancel(self, *words):
        """Cancel the job or, with --signal=TERM, tell it to stop."""
        self.cluster.run("scancel", *words, self.number)

    def wait(self, *states, timeout=300):
        """Wait until the job has ended or is in one of these states; return the state."""
        end = time.monotonic() + timeout
        while (state := self.show("JobState")) not in (states or ENDED):
            assert time.monotonic() < end, f"job {self.number} is {state}\n{self.output}"
            time.sleep(0.2)
        return state

    def lose_its_port(self):
        """Give a held job's port to another program and release the job; return the port."""
        port = 20000 + self.number % 10000
        listen = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(120)"
        start = f'"{sys.executable}" -c "{listen}" > /dev/null 2>&1 &'
        until = f"until (: < /dev/tcp/node1/{port}) 2> /dev/null; do sleep 0.1; done"
        self.cluster.run("bash", "-c", f"{start} {until}", node=1)
        self.cluster.run("scontrol", "release", self.number)
        return port

    def completed(self, timeout=300):
        assert self.wait(timeout=timeout) == "COMPLETED", self.output
        return self

    def wait_for(self, ready, timeout=120):
        """Wait until `ready()` is true; return the result."""
        end = time.monotonic() + timeout
        while not (result := ready()):
            state = self.show("JobState")
            late = state in ENDED or time.monotonic() > end
            assert ready() or not late, f"the job is {state}:\n{self.output}"
            time.sleep(0.1)
        return result

    def epochs(self):
        return [int(n) for n in re.findall(r"^epoch (\d+) ", self.output, re.MULTILINE)]


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
