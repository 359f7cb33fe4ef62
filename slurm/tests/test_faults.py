"""A rank fails, hangs or is told to stop: what it costs, and how the guide's commands find it."""

import os
import re
import shlex
import signal
import sys

import pytest
from clusters import ON_A_CLUSTER, TWO_BY_TWO, in_the_guide
from support.jobs import Job, finished, kill, run
from support.positions import GATE, KILLED, ON_RANK_1, at, wait_at_the_gate
from support.results import same_bits, shape, weights
from support.scripts import LONG, ON_PATH, ROOT, SMALL, command, edited, forked

SLOW = pytest.mark.slow


def bad_data(lines):
    """Return changes with which `lines`, which see `index`, run before a sample is read."""
    body = "".join(f"        {line}\n" for line in lines.splitlines())
    data = f"""\
class BadData(TensorDataset):
    def __getitem__(self, index):
{body}        return super().__getitem__(index)


def load_datasets():
"""
    return (
        ("    return TensorDataset(shifted,", "    return BadData(shifted,"),
        ("def load_datasets():\n", data),
    )


BAD_SAMPLE = bad_data('if index == 1234: raise ValueError("the first cause")')  # of one rank
# Python sends SIGTERM to the workers, too, and waits for them: they must end at last.
SOON = ("signal.alarm(60)", "signal.alarm(3)")


@pytest.mark.parametrize(
    ("changes", "workers", "cause"),
    [
        (BAD_SAMPLE, 0, "ValueError: the first cause"),
        pytest.param((*BAD_SAMPLE, SOON), 2, "ValueError: the first cause", marks=SLOW),
        ([at(0, 15, KILLED, ON_RANK_1)], 0, "Signal 9 (SIGKILL) received by PID"),
    ],
    ids=["an exception", "in a loader worker", "killed"],
)
def test_torchrun_names_the_rank_that_failed(tmp_path, changes, workers, cause):
    """It sends SIGTERM to the others. Step 4 handles it, but the next collective fails."""
    script = edited(tmp_path, "04", *changes)
    job = run(command(script, *LONG, f"--num-workers={workers}"), tmp_path)
    assert job.returncode == 1
    report = job.stderr.split(" FAILED\n")[1]  # the first, unless others failed that second
    assert cause in report, job
    assert "forcefully exiting via" not in job.stderr  # the others had ended by then
    assert not (tmp_path / "checkpoint.pt.interrupted").exists()


@SLOW
def test_workers_of_a_dead_agent_train_on(trained, tmp_path):
    """Nothing stops the ranks, and nothing restarts them if they fail."""
    with Job(command(edited(tmp_path, "04", at(0, 15, GATE)), "1", *SMALL), tmp_path) as job:
        gate = wait_at_the_gate(job)
        kill(job.process)
        job.wait()
        gate.touch()
        job.wait_until_gone()
    assert same_bits(job, trained("03", "1", *SMALL))


@SLOW
@pytest.mark.parametrize("step", ["01", "02", "03", "04"])
def test_ctrl_c_and_in_steps_1_to_3_sigterm_end_all_at_once(tmp_path, step):
    """All processes get it, from a terminal or from Slurm. What was saved is left."""
    number = signal.SIGINT if step == "04" else signal.SIGTERM
    with Job(command(step, "99", *SMALL), tmp_path) as job:
        job.wait_for("^epoch 2 ")
        os.killpg(job.process.pid, number)
        assert job.wait().returncode != 0
        job.wait_until_gone()
    assert weights(job)


SEED = "    torch.manual_seed(args.seed)\n"
FULL = "    __import__('resource').setrlimit(1, (65536, 65536))  # RLIMIT_FSIZE, in bytes\n"
WIDE = ("--batch-size=64", "--width=16")  # its checkpoint is larger than its output


@SLOW
def test_a_full_disk(tmp_path):
    finished(forked("04", "1", *WIDE), tmp_path)
    saved = (tmp_path / "checkpoint.pt").read_bytes()
    job = run(forked(edited(tmp_path, "04", (SEED, FULL + SEED)), "3", *WIDE), tmp_path)
    assert not re.search(r"exit codes of the ranks: .*\b0\b", job.stderr), job
    assert re.search(r"OSError: .*(?s:.*)unexpected pos \d+ vs \d+", job.stderr), job
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved


# In the second epoch, the last rank waits for a sample for ever.
STUCK = bad_data(
    """\
self.loaded = vars(self).get("loaded", 0) + 1
last = dist.get_world_size() - 1
if dist.get_rank() == last and self.loaded > 14000 // (last + 1):
    time.sleep(3600)"""
)


@pytest.mark.gpu
@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="py-spy may need to be root")
def test_a_rank_hangs_on_this_machine(tmp_path):
    """Found by where.py, which may list other training jobs as well."""
    with Job(command(edited(tmp_path, "04", *STUCK), *LONG), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        pid, where = job.workers()[1].pid, [sys.executable, ROOT / "slurm" / "where.py"]
        hangs = rf"^1 +\S+ +{pid} +04_multinode.py:\d+ (BadData\.)?__getitem__ +<--$"
        job.wait_for(lambda: re.search(hangs, finished(where, tmp_path, ON_PATH).stdout, re.M))


@SLOW
@ON_A_CLUSTER
def test_a_rank_hangs_on_a_cluster(cluster, clone, submit, monkeypatch):
    """Use the page's settings for the output of each rank, and its commands to find the rank."""
    for word in shlex.split(in_the_guide(r"^((?:export .*\n)+)sbatch ").replace("export", "")):
        monkeypatch.setitem(cluster.environment, *word.split("=", 1))
    edited(clone, "04", *STUCK)
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for(lambda: "\n[rank0] epoch 1  " in job.stdout)  # not only when the job ends

    def typed(command, pid=""):
        words = command.replace("24", str(job.number)).replace("--pid 18", f"--pid {pid}")
        return cluster.run("bash", "-c", f"source .venv/bin/activate; {words}", cwd=clone)

    where, shown = in_the_guide(r"^\$ (python .*where.py 24)\n((?:.*\n)*?)```$")
    job.wait_for(lambda: shape(typed(where)) == shape(shown))
    pid = re.search(r"^3 +node2 +(\d+) .*<--$", typed(where), re.MULTILINE)[1]
    dump = typed(in_the_guide(r"^(srun .* py-spy dump .*)$"), pid)
    assert "    BadData.__getitem__ (04_multinode.py:" in dump
    typed(in_the_guide(r"^(python .*where.py 24 --signal.*)$"))
    job.becomes("FAILED")
    for rank in range(4):
        assert f"[rank{rank}] Fatal Python error: Aborted" in job.stdout
    # The agent may end before it has copied all lines of a rank to its own output.
    files = [*clone.glob(f"logs/{job.number}_*/attempt_0/?/stderr.log")]
    assert len(files) == 4
    assert sum("in __getitem__" in path.read_text(encoding="utf-8") for path in files) == 1
