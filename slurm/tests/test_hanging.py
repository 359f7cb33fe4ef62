"""A rank that hangs or is busy: how to find it, and what it costs when the others must stop.

The commands are those of slurm/README.md, which shows what they print.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from bad_data import bad_data
from clusters import ON_A_CLUSTER, ONE_CLUSTER, TWO_BY_TWO
from support.jobs import RESTARTS, Job, finished, kill, run
from support.positions import KILLED, ON_RANK_1, at
from support.results import epochs, resumed, shape, weights
from support.scripts import LONG, ON_PATH, ROOT, TORCHRUN, command, edit, edited, forked

SLOW = pytest.mark.slow
PAGE = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
REPLACE = "        os.replace("  # in a save
BY_FORCE = "forcefully exiting via"  # torchrun prints this before it kills a rank


def on_the_page(pattern):
    """Return the groups of a pattern, as matched by the page."""
    return re.search(pattern, PAGE, re.MULTILINE).groups()


@SLOW
def test_a_save_longer_than_the_timeout(tmp_path):
    """The others wait for rank 0 in their next collective, which has a timeout."""
    short = ("timedelta(minutes=5)", "timedelta(seconds=10)")
    slow = (REPLACE, f"        time.sleep(15)\n{REPLACE}")
    job = run(forked(edited(tmp_path, "04", short, slow), *LONG), tmp_path)
    assert job.returncode == 1
    assert "Timed out waiting 10000ms" in job.stderr
    assert epochs(job) == [1]
    assert weights(job)  # the save was completed


# In the second of three attempts, rank 1 is killed while rank 0 saves and rank 2 loads a sample.
SECOND = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"'
NOT_RANK_0 = "        if dist.get_rank() != 0:  # all ranks hold"
BUSY = (
    (NOT_RANK_0, f'        if {SECOND}:\n            open("saving", "w").close()\n{NOT_RANK_0}'),
    (
        REPLACE,
        f"""\
        if {SECOND}:
            while not os.path.exists("killed"):
                time.sleep(0.01)
            time.sleep(10)
{REPLACE}""",
    ),
    *bad_data(
        f"""\
if {SECOND} and dist.get_rank() == 2 and os.path.exists("saving"):
    open("loading", "w").close()
    time.sleep(3600)"""
    ),
)


@pytest.mark.weekly("takes a minute: torchrun gives a busy rank 30 seconds")
def test_a_busy_rank_delays_the_restart(tmp_path):
    """First a rank dies while the others wait for it, then while the others are busy.

    torchrun gives them 30 s to end. TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 1 s here, does not apply.
    """
    options = {"nprocs": 3, "torchrun": ("--max-restarts=2", "--log-dir=logs")}
    first = at(1, 15, KILLED, ON_RANK_1)
    start = command(edited(tmp_path, "04", *BUSY, first), *LONG, **options)
    with Job(start, tmp_path, RESTARTS | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}) as job:
        job.wait_for(lambda: resumed(job))
        assert BY_FORCE not in job.stderr
        job.wait_for((tmp_path / "loading").exists)
        loads = job.workers()[2].pid
        kill(job.workers()[1])
        (tmp_path / "killed").touch()
        assert job.wait().returncode == 0, job
        job.wait_until_gone()
    assert re.findall(rf"process (\d+) .*{BY_FORCE}", job.stderr) == [str(loads)]
    assert resumed(job) == [1, 2]  # the save of 10 s was completed
    assert epochs(job)[-1] == 4
    assert sorted(p.name for p in tmp_path.glob("logs/*/*")) == [f"attempt_{n}" for n in range(3)]


# ---------------------------------------------------------------- what each rank prints

PRINTS = {"--tee=3": (0, 1), "--redirects=3": (), "--tee=3 --local-ranks-filter=0": (0,)}


def logs(folder):
    """Return the log files that torchrun has written: {name: text}."""
    paths = folder.glob("logs/*/*/*/std*.log")
    return {str(path.relative_to(folder / "logs")): path.read_text("utf-8") for path in paths}


@pytest.mark.slow
def test_the_output_of_each_rank(tmp_path):
    start, shown = on_the_page(r"^\$ (torchrun .*\\\n.*)\n((?:.*\n)*?)```$")
    assert re.findall(r"^\| `(--(?:tee|redirects).*?)` \|", PAGE, re.MULTILINE) == [*PRINTS]
    for options, ranks in PRINTS.items():
        folder = tmp_path / options.replace(" ", "")
        folder.mkdir()
        job = finished(["bash", "-c", start.replace("--tee=3", options)], folder, ON_PATH)
        assert sorted(job.stdout.splitlines()) == [shown.splitlines()[rank] for rank in ranks]
        written = {re.sub("^[^/]+/", "", name): text for name, text in logs(folder).items()}
        assert written == {
            f"attempt_0/{rank}/{name}.log": text
            for rank in (0, 1)
            for name, text in (("stdout", f"I am rank {rank}\n"), ("stderr", ""))
        }


# ---------------------------------------------------------------- where each rank is

# In the second epoch, the last rank waits for a sample for ever.
STUCK = bad_data(
    """\
self.loaded = vars(self).get("loaded", 0) + 1
last = dist.get_world_size() - 1
if dist.get_rank() == last and self.loaded > 14000 // (last + 1):
    time.sleep(3600)"""
)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="py-spy may need to be root")
def test_a_rank_hangs_on_this_machine(tmp_path):
    """Found by where.py, which may list other training jobs as well."""
    with Job(command(edited(tmp_path, "04", *STUCK), *LONG), tmp_path) as job:
        job.wait_for("^epoch 1 ")
        first, second = (job.workers()[rank].pid for rank in (0, 1))
        waits = rf"^0 +\S+ +{first} .* _engine_run_backward$"
        hangs = rf"^1 +\S+ +{second} +04_multinode.py:\d+ (BadData\.)?__getitem__ +<--$"
        where = [sys.executable, ROOT / "slurm" / "where.py"]
        both = re.compile(rf"{waits}\n{hangs}", re.MULTILINE).search
        job.wait_for(lambda: both(finished(where, tmp_path, ON_PATH).stdout))


@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, as only root can")
def test_py_spy_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        spy = shutil.copy(Path(sys.executable).with_name("py-spy"), folder)
        command = [spy, "dump", "--pid", str(os.getpid())]
        asked = subprocess.run(command, check=False, user=65534, stderr=subprocess.PIPE, text=True)
    (said,) = on_the_page("^Otherwise it prints `(.*?)`")
    assert asked.stderr.startswith(said)


@SLOW
@ON_A_CLUSTER
@ONE_CLUSTER
def test_a_rank_hangs_on_a_cluster(cluster, clone, submit, monkeypatch):
    """Use the page's settings for the output of each rank, and its commands to find the rank."""
    (settings,) = on_the_page(r"^((?:export .*\n)+)sbatch ")
    for name, value in re.findall(r"(\w+)='?([^'\s]+(?: (?='))?)", settings):
        monkeypatch.setitem(cluster.environment, name, value)
    for old, new in STUCK:
        edit(clone / "04_multinode.py", old, new)
    job = submit("04", *LONG, options=TWO_BY_TWO)
    job.wait_for(lambda: "\n[rank0] epoch 1  " in job.output)  # not only when the job ends

    def on_the_login_node(words):
        words = f"source .venv/bin/activate; {words}"
        return cluster.run("bash", "-c", words, cwd=clone)

    where, shown = on_the_page(r"^\$ (python .*where.py) \d+\n((?:.*\n)*?)```$")

    def as_shown():
        found = on_the_login_node(f"{where} {job.number}")
        return shape(found) == shape(shown) and found

    found = job.wait_for(as_shown)
    rank, node, pid = re.search(r"^(\d+) +(\w+) +(\d+) .*<--$", found, re.MULTILINE).groups()
    assert rank == "3"

    (dump,) = on_the_page(r"^(srun .* py-spy dump .*)$")
    words = {"--jobid": job.number, "--nodelist": node}
    for name, value in words.items():
        dump = re.sub(rf"{name}=\w+", f"{name}={value}", dump)
    dump = re.sub(r"--pid \d+", f"--pid {pid}", dump)
    assert "    BadData.__getitem__ (04_multinode.py:" in on_the_login_node(dump)

    (abort,) = on_the_page(r"^(srun .* pkill .*)$")
    on_the_login_node(re.sub(r"--jobid=\d+", f"--jobid={job.number}", abort))
    assert job.wait() == "FAILED"
    for number in range(4):
        assert f"[rank{number}] Fatal Python error: Aborted" in job.output
    # The agent may end before it has copied all lines of a rank to its own output.
    dumps = "".join(logs(clone).values())
    assert re.search(r"04_multinode.py\", line \d+ in __getitem__$", dumps, re.MULTILINE)
    folders = {name.partition("/")[0] for name in logs(clone)}
    assert len(folders) == 2  # one per node
    assert all(re.fullmatch(rf"{job.number}_\w{{8}}", name) for name in folders)


# ---------------------------------------------------------------- different collectives

DETAIL = """
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(minutes=1))
rank, numbers = dist.get_rank(), torch.ones(3)
for seconds in (30, 3):  # first, rank 1 calls another collective, and then none
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    try:
        if rank == 0:
            dist.all_reduce(numbers, group=group)
        elif seconds == 30:
            dist.broadcast(numbers, 0, group=group)
    except RuntimeError as error:
        print(f"rank {rank}: {error}")
dist.barrier()
print(f"rank {rank} builds DDP")
DDP(torch.nn.Linear(2, 2))
"""


@SLOW
def test_what_debug_detail_finds(tmp_path):
    """If this fails because DDP no longer crashes, correct the page."""
    script = tmp_path / "collectives.py"
    script.write_text(DETAIL, encoding="utf-8")
    start = [TORCHRUN, "--standalone", "--nproc-per-node=2", script]
    job = run(start, tmp_path, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for quoted in re.findall(r"`((?:Detected mismatch|Ranks 1 failed).*?)`", PAGE):
        assert quoted in job.stdout
    assert "builds DDP" in job.stdout
    assert re.search(r"Signal 11 \(SIGSEGV\) received by PID", job.stderr)
