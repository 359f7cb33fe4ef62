"""Batch files on a Slurm cluster that the tests start. conftest.py imports the fixtures."""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from practice.cluster import Cluster, missing
from support.jobs import environment
from support.scripts import LONG, ROOT, SCRIPTS, edit

ON_A_CLUSTER = pytest.mark.skipif(bool(missing()), reason=str(missing()))
BATCH = {path.name[:2]: f"slurm/{path.stem}.sbatch" for path in SCRIPTS}
ON_TWO_NODES = ("--nodes=2", "--gpus-per-node=1")
TWO_BY_TWO = ("--nodes=2", "--gpus-per-node=2")

# In a copy of step 4, all ranks wait in the second epoch for a test to do something to them.
ASK = "            if step % 10 == 0 and self._stop_agreed():"
GATE = f"""\
            if self.epochs_run == 1 and step == 15:
                open(f"{{self.path}}.waiting", "w").close()
                while not (os.path.exists("go") or stop_signals):
                    time.sleep(0.01)
{ASK}"""


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

    def wait(self, *states, timeout=300):
        """Wait until the job has ended or is in one of these states; return the state."""
        try:
            return self.cluster.wait(self.number, *states, timeout=timeout)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{self.output}")

    def completed(self, timeout=300):
        assert self.wait(timeout=timeout) == "COMPLETED", self.output
        return self

    def wait_for(self, ready, timeout=240):
        """Wait until `ready()` is true."""
        end = time.monotonic() + timeout
        while not ready():
            state = self.show("JobState")
            if time.monotonic() > end or state not in ("PENDING", "RUNNING", "CONFIGURING"):
                pytest.fail(f"it did not happen; the job is {state}:\n{self.output}")
            time.sleep(0.1)
        return self

    def wait_at_the_gate(self):
        """Wait until a gated step 4 is in the middle of its second epoch."""
        return self.wait_for(Path(f"{self.checkpoint}.waiting").exists)

    def open_the_gate(self):
        (self.folder / "go").touch()

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
        cluster.run("scancel", job.number)
    cluster.wait_until_idle()


@pytest.fixture
def gated(clone, submit):
    """Submit step 4 with the gate; return the job once it waits there."""

    def submit_gated(*options, step="04", changes=()):
        for old, new in [(ASK, GATE), *changes]:
            edit(clone / "04_multinode.py", old, new)
        return submit(step, *LONG, options=options).wait_at_the_gate()

    return submit_gated
