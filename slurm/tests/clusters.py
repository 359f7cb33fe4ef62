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


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), environment=environment()) as cluster:
        yield cluster


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository with a virtual environment, like a reader's."""
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    for name in ("slurm", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    activate = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    (tmp_path / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")
    return tmp_path


class Submitted:
    """A job in the queue."""

    def __init__(self, cluster, folder, file, *arguments, options=()):
        self.cluster, self.folder = cluster, folder
        self.number = cluster.sbatch(*options, file, *arguments, cwd=folder)

    @property
    def output(self):
        found = list(self.folder.glob(f"*_{self.number}.out"))
        return found[0].read_text(encoding="utf-8") if found else ""

    @property
    def checkpoint(self):
        return self.folder / f"{self.show('JobName')}.pt"

    def show(self, name):
        return self.cluster.show(self.number)[name]

    def cancel(self, *words):
        """Cancel the job or, with --signal=TERM, tell it to stop."""
        self.cluster.run("scancel", *words, self.number)

    def wait(self, *states, timeout=300):
        """Wait until the job has ended or is in one of these states; return the state."""
        try:
            return self.cluster.wait(self.number, *states, timeout=timeout)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{self.output}")

    def completed(self, timeout=300):
        assert self.wait(timeout=timeout) == "COMPLETED", self.output
        return self

    def wait_for(self, ready, timeout=120):
        """Wait until `ready()` is true."""
        end = time.monotonic() + timeout
        while not ready():
            state = self.show("JobState")
            late = time.monotonic() > end or state not in ("PENDING", "RUNNING", "CONFIGURING")
            if late and not ready():
                pytest.fail(f"it did not happen; the job is {state}:\n{self.output}")
            time.sleep(0.1)
        return self

    def epochs(self):
        return [int(n) for n in re.findall(r"^epoch (\d+) ", self.output, re.MULTILINE)]


@pytest.fixture
def submit(cluster, clone):
    """Submit a batch file from the clone; cancel any jobs that are left at the end."""
    jobs = []

    def submit(step, *arguments, options=(), folder=clone):
        jobs.append(Submitted(cluster, folder, BATCH.get(step, step), *arguments, options=options))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.cancel()
    cluster.wait_until_idle()
