"""The checker as a tool: its options, what its report says, and that it leaves nothing behind."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checking import judged, plan_of
from ddp_check import __version__, events
from ddp_check.__main__ import parse_args
from ddp_check.drills import perform
from ddp_check.plan import launcher_of, planned
from ddp_check.report import changes, exit_code, text_of
from ddp_check.rules import RULES, judge
from ddp_check.rules.base import UNSURE, WRONG
from ddp_check.run import Run
from support.jobs import Job, finished, run
from support.scripts import ON_PATH, ROOT, write

pytestmark = pytest.mark.usefixtures("own_folder")
PAGE = (ROOT / "more" / "checker" / "README.md").read_text(encoding="utf-8")
HERE = {"PYTHONPATH": str(ROOT / "more" / "checker")}


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its name."""

    def make(text, name="train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, text)
        return name

    return make


def ran(script, *arguments, launcher="python", **options):
    """Run a script without judging it."""
    with planned(script, arguments, launcher=launcher, **options) as plan:
        return plan.undisturbed


# ---------------------------------------------------------------- how a script is run

SAYS = "import os, sys\nprint(os.environ.get('FRUIT'), __name__, sys.argv[1:])\n"


def test_variables_and_modules(script, monkeypatch):
    """A module is found in its package, and an option of the script is not one of the checker."""
    name = script(SAYS)
    monkeypatch.setenv("FRUIT", "fig")
    assert ran(name, "-m", "x").output == "fig __main__ ['-m', 'x']\n"
    script("WORD = 'plum'\n", "package/words.py")
    script(f"from package import words\n{SAYS}print(words.WORD)\n", "package/train.py")
    for launcher in ("python", "srun"):
        run = ran("package.train", "1", module=True, launcher=launcher, nproc=1)
        assert run.output == "fig __main__ ['1']\nplum\n"


def test_options_of_the_checker_and_of_the_script(script, monkeypatch):
    words = ["--restart-args=--resume b", script("pass"), "--epochs"]
    monkeypatch.setattr(sys, "argv", ["ddp-check", *words])
    args = parse_args()
    assert args.restart_args == ["--resume", "b"]
    assert (args.script, args.arguments) == ("train.py", ["--epochs"])


ASKS = "rank = int(os.environ['RANK'])\n"
STARTED_BY = {  # part of a script: the launcher that it is for
    ASKS + "torch.multiprocessing.spawn(main)": "python",  # as pytorch/examples/imagenet
    "from torch.multiprocessing import spawn\nspawn(main)": "python",
    "'RANK' in os.environ or os.environ['SLURM_PROCID']": "torchrun",
    "multiprocessing.Process(target=main)": "python",
    ASKS + "multiprocessing.Process(target=watch)": "torchrun",
    ASKS + "# instead of mp.spawn(main, nprocs=2)": "torchrun",
    "seeds = numpy.random.SeedSequence(0).spawn(size)": "torchrun",
}


@pytest.mark.parametrize("text", STARTED_BY)
def test_which_launcher_a_script_is_for(text):
    assert launcher_of(text) == STARTED_BY[text]


def test_a_script_for_two_launchers(script, fork_ranks):
    lines = "import os, sys\nfrom torch.multiprocessing import spawn\n"
    lines += "spawn(print) if sys.argv[1:] else int(os.environ['RANK'])"
    with planned(script(lines)) as plan:
        first = plan.launcher
        assert (plan.undisturbed.returncode, first, plan.launcher) == (0, "python", "torchrun")
    with planned(script(lines), launcher="python") as plan:
        assert plan.undisturbed.end.text == "KeyError: 'RANK'"


def test_files_of_the_user_stay_as_they_are(tmp_path, script, fork_ranks, monkeypatch):
    """Files are copied, or linked and copied before they change; large folders must not change."""
    monkeypatch.setattr("ddp_check.mirror.MAX_ENTRIES", 9)  # folders of more are linked
    (tmp_path / "unreadable").symlink_to("/proc/self/mem")
    for name in ("a/b/c/d/e/f", "data", "many/1/2", "many/3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "log.txt").write_text("mine", encoding="utf-8")
    for number in range(9):
        (tmp_path / "many" / str(number)).mkdir(exist_ok=True)
    (tmp_path / "results.h5").write_bytes(bytes(1 << 22))
    (tmp_path / "data" / "model.txt").write_text("mine", encoding="utf-8")
    database = sqlite3.connect(tmp_path / "data" / "old.db")  # linked, as all files of data
    database.execute("CREATE TABLE old (loss)")
    database.commit()
    content = (tmp_path / "data" / "old.db").read_bytes()
    before = sorted(tmp_path.rglob("*"))
    lines = """import ctypes, os, shutil, sqlite3, tempfile, torch
from pathlib import Path
ctypes.CDLL(None).fopen(b"results.h5", b"w")  # as a library in C does
assert os.path.getsize("results.h5") == 0
for name in ("a/b/c/d/e/f", "data"):
    assert "mine" in open(f"{name}/log.txt").read()
    open(f"{name}/log.txt", "a").write("of the script")
    torch.save(1, f"{name}/saved.pt")
os.write(os.open("data/log.txt", os.O_WRONLY | os.O_APPEND), b"by a library")
torch.save(1, "data/model.txt")
sqlite3.connect("data/old.db").execute(f"CREATE TABLE runs{os.getpid()} (loss)")
if os.environ["RANK"] == "0":
    os.symlink("log.txt", "data/latest")
    open("data/latest", "a").write("by a link")
    assert os.path.islink("data/latest")
assert open("many/1/2/log.txt").read() == "mine"
os.makedirs("many/1", exist_ok=True)
for change in (
    lambda: open("many/1/2/log.txt", "a"),
    lambda: torch.save(1, "many/saved.pt"),
    lambda: tempfile.TemporaryFile(dir="many"),
    lambda: shutil.rmtree("many/3"),
    lambda: os.remove("many/3/log.txt"),
    lambda: os.rename("many/1", "many/6"),
    lambda: Path("many/new").mkdir(),
):
    try:
        change()
    except PermissionError as error:
        print(error)
    else:
        raise AssertionError("it may change the folder")
open("many/new.txt", "w")
"""
    run, verdicts = judged(script(lines), launcher="torchrun")
    assert run.output.count("does not let the script change") > 14, run.output
    assert verdicts["script_ends"].status == UNSURE
    assert "folder with fewer files" in verdicts["script_ends"].text
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".py") == before
    assert {path.read_text() for path in tmp_path.rglob("*.txt")} == {"mine"}
    assert (tmp_path / "data" / "old.db").read_bytes() == content
    assert (tmp_path / "results.h5").stat().st_size == 1 << 22


def test_weights_that_a_script_needs_are_not_left_out(tmp_path, script, fork_ranks):
    for name in ("model/weights.safetensors", "data/train.bin", ".env"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = "import os\nopen('data/train.bin')\nopen('.env')\nassert not os.listdir('model')"
    with planned(script(lines), launcher="python") as plan:
        assert (plan.undisturbed.returncode, changes(plan)) == (0, [])
    with planned(script("open('model/weights.safetensors')"), launcher="python") as plan:
        assert plan.undisturbed.returncode == 0
        assert "checkpoints" in changes(plan)[0]


SLURM = """import os
from socket import gethostbyname
N = int(os.environ["WORLD_SIZE"])
assert N == int(os.environ["SLURM_NTASKS"]) == int(os.environ["SLURM_GPUS_ON_NODE"]) == 2
assert 0 <= int(os.environ["SLURM_PROCID"]) == int(os.environ["SLURM_LOCALID"]) < N
assert gethostbyname(os.environ["SLURM_LAUNCH_NODE_IPADDR"]) == "127.0.0.1"
assert os.environ["SLURM_JOB_NAME"] and os.environ["MASTER_PORT"]
assert os.environ["PYTHONPATH"].endswith(":mine")
"""


def test_what_srun_sets(script, monkeypatch):
    """The job that the checker itself runs in is not seen; PYTHONPATH keeps what it had."""
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("PYTHONPATH", "mine")
    run = ran(script(SLURM), launcher="srun")
    assert run.returncode == 0, run.output


# ---------------------------------------------------------------- GPU calls

INSISTS = "cuda_is_available = False\nassert cuda_is_available\n"  # raises without a message


@pytest.mark.parametrize(
    ("translate", "ran_translated"), [("auto", True), ("yes", True), ("no", False)]
)
def test_who_decides_about_translation(script, fork_ranks, translate, ran_translated):
    with planned(script(INSISTS), launcher="python", translate=translate) as plan:
        assert plan.undisturbed.translate == ran_translated
        assert plan.lacking == ("AssertionError" if translate == "auto" else "")


def test_a_script_that_joins_if_there_are_several_gpus(script, fork_ranks):
    lines = """import torch
model = torch.nn.Linear(1, 1)
if torch.cuda.device_count() > 1:
    torch.distributed.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(model)
model(torch.ones(1)).backward()
torch.optim.SGD(model.parameters(), 0.1).step()
"""
    run = ran(script(lines), launcher="torchrun")
    assert run.translate and len(run.joins) == 2


# ---------------------------------------------------------------- how a script ended

CRASH = """import os, sys  # only one rank raises the error, because two tracebacks could mix
def load():
    raise ValueError("no data")
print("before")
sys.stdout.flush()
os.environ.get("RANK", "0") == "0" and load()
"""
NETWORK = "it needs the network: download the data first"
ENDINGS = {  # script: what the verdict on its end is and says, and where
    CRASH: (WRONG, "ValueError: no data$", "train.py:3"),
    "import sys\nsys.exit('no config.yaml')": (WRONG, "exits with code 1: no config.yaml$", ""),
    "import sys\nsys.exit(3)": (WRONG, "exits with code 3: nothing is printed$", ""),
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": (WRONG, "is killed by SIGKILL$", ""),
    """import traceback
print("Error: 0.5")
try:
    import nowhere
except ImportError:
    traceback.print_exc()
raise Exception("bad")""": (WRONG, "^Exception: bad$", "train.py:7"),
    "next(iter([]))": (WRONG, "^StopIteration$", "train.py:1"),
    "def f(:\n    pass": (WRONG, "SyntaxError: invalid syntax$", "train.py:1"),
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()": (
        *(WRONG, "the following arguments are required: data; usage: train.py", ""),
    ),
    # no fault of the script
    "import urllib.request as r\nr.urlopen('http://localhost:1')": (
        *(UNSURE, f"URLError.+ {NETWORK}", "train.py:2"),
    ),
    "open('../data/train.csv')": (UNSURE, "NotFound.+ use absolute paths", "train.py:1"),
    "open('https://example.org/data.csv')": (UNSURE, f"NotFound.+ {NETWORK}", "train.py:1"),
}
BY_TORCHRUN = pytest.param("torchrun", CRASH, marks=pytest.mark.slow)
LAUNCHED = [*(("python", text) for text in ENDINGS), BY_TORCHRUN]


@pytest.mark.parametrize(("launcher", "text"), LAUNCHED)
def test_what_ended_the_script(tmp_path, script, request, launcher, text):
    """The exit code is the script's, not the launcher's."""
    if launcher == "python":
        request.getfixturevalue("fork_ranks")
    (tmp_path / "data.pt").touch()
    _, verdicts = judged(script(text), launcher=launcher)
    status, says, where = ENDINGS[text]
    end = verdicts["script_ends"]
    assert (end.status, end.where) == (status, where)
    assert re.search(says, end.text)
    assert WRONG not in {one.status for name, one in verdicts.items() if name != "script_ends"}


# ---------------------------------------------------------------- the report


def test_the_verdict_comes_first(script, fork_ranks):
    """Then what failed, with the end of its traceback; what was not seen is one line."""
    with planned(script(CRASH), launcher="python") as plan:
        verdicts = judge(plan.undisturbed)
        lines = text_of(plan, verdicts).splitlines()
        more = text_of(plan, verdicts, everything=True).splitlines()
    assert lines[0].startswith("train.py: wrong: 1 wrong, ")
    assert re.fullmatch(r"ran: 2 processes under python, on the CPU, \d+ s", lines[1])
    assert lines[3] == "FAIL     the script ends: ValueError: no data (train.py:3)"
    assert {'         |   File "train.py", line 6, in <module>'} < {*lines[5:-1]}
    assert lines[-2:-1] == ["         | ValueError: no data"]
    assert lines[-1] == f"not seen {len(RULES) - 1} rules had nothing to look at; --all says why"
    assert len([line for line in more if line.startswith(("not seen ", "n/a "))]) == len(RULES) - 1
    assert max(map(len, more)) <= 80


# ---------------------------------------------------------------- the command


def command(*words):
    return [sys.executable, "-m", "ddp_check", *words]


def ended(code, *job):
    """Run a command that ends with this exit code, and return the result."""
    result = run(*job)
    assert result.returncode == code, result
    return result


CHECK = "python -m ddp_check --launcher python"
JOINS = "import torch.distributed as d; d.init_process_group("
JOINS += 'backend="gloo", store=d.HashStore(), rank=0, world_size=1)'
COMMANDS = {  # a line of the shell: its exit code, and what it prints
    f"{CHECK} --all train.py | head -n 1": (0, "train.py: wrong: "),
    f"touch empty.py; {CHECK} empty.py": (2, "empty.py: no training was seen: "),
    f"echo '{JOINS}' > joins.py; {CHECK} joins.py": (2, "joins.py: no training was seen: "),
    """python -c "import sys, ddp_check.__main__ as command
sys.argv[1:], command.check = ['train.py'], lambda args: 1 / 0
command.main()" """: (2, "ddp-check itself failed, which says nothing about the script"),
    f"{CHECK} --version": (0, f"ddp-check {__version__}\n"),
    f"{CHECK} -m nowhere.train": (2, "ddp-check: error: there is no nowhere/train.py\n"),
    "python -m ddp_check": (2, "ddp-check --drill kill train.py"),  # an example
    """python -c "import runpy, sys
sys.modules['psutil'] = None
runpy.run_module('ddp_check.__main__')" """: (2, "ddp-check: psutil is missing here: pip install "),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_what_the_command_says(tmp_path, script, line):
    code, says = COMMANDS[line]
    script(CRASH)
    result = ended(code, ["bash", "-c", line], tmp_path, {**HERE, **ON_PATH})
    assert says in result.stdout + result.stderr
    assert "BrokenPipe" not in result.stderr


def test_a_rule_that_breaks_is_an_error_of_the_checker(tmp_path):
    plan = plan_of("05", tmp_path)
    plan.undisturbed.by_rank(events.Step)[0][3].rates = 3  # as no observer reports it
    verdicts = judge(plan.undisturbed)
    assert exit_code(plan, verdicts) == 2
    first = " ".join(text_of(plan, verdicts).partition("\nran:")[0].split())
    assert "no verdict, and the checker itself failed in rates_are_equal: 1 error, " in first
    (broken,) = (verdict for verdict in verdicts if verdict.rule == "rates_are_equal")
    assert broken.details[0].startswith("Traceback")


def test_a_drill_of_a_script_that_did_not_end():
    plan = SimpleNamespace(undisturbed=Run(2, Path(), returncode=None))
    (verdict,) = perform("world-size", plan)
    assert verdict.text.startswith("the script fails without the drill: still busy after 0 s")


# Has a child, as torchrun has, and leaves a temporary folder behind.
STAYS = """import subprocess, sys, tempfile, time
waits = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(waits, start_new_session=True)
open("ready", "w").close()
tempfile.mkdtemp()
time.sleep(600)
"""
SIGNALS = [
    pytest.param(signal.SIGTERM, "python"),  # a timeout of CI, or `timeout 60 ddp-check …`
    pytest.param(signal.SIGINT, "srun", marks=pytest.mark.slow),  # Ctrl-C
    pytest.param(signal.SIGKILL, "torchrun", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("number", "launcher"), SIGNALS)
def test_nothing_is_left_behind(tmp_path, script, number, launcher):
    """Neither a process nor a folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    env = {**HERE, "TMPDIR": str(folder)}
    with Job(command("--launcher", launcher, script(STAYS)), tmp_path, env) as job:
        job.wait_for(lambda: [*folder.glob("ddp_check-*/undisturbed/ready")])
        assert len(job.processes()) > 3
        os.kill(job.process.pid, number)
        assert job.process.wait(timeout=60) == -number
        end = time.monotonic() + 60
        while job.processes() or [*folder.iterdir()]:
            assert time.monotonic() < end, job.processes()
            time.sleep(0.05)


# ---------------------------------------------------------------- installed


@pytest.mark.slow
def test_installed_as_its_page_says(tmp_path, script):
    """The commands of the workflow, from a Git address, in an environment without psutil."""
    *installs, check = re.findall(r"^ +- run: (.+)$", PAGE, re.M)
    assert [line for line in installs if "torch " in line] == installs[:1]  # it is here already
    clone = tmp_path / "clone"
    files = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "more" / "checker", clone / "more" / "checker", ignore=files)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", clone]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():  # torch, pytest and what they need
        if "psutil" not in path.name and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    path = {"PATH": f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}"}
    for line in installs[1:]:
        here = line.replace("https://github.com/OWNER/ddp-ladder", f"file://{clone}")
        assert here != line
        finished(["bash", "-c", here], tmp_path, path)
    assert [*packages.glob("psutil-*")]
    assert [*packages.glob(f"ddp_check-{__version__}.dist-info")]

    script(CRASH)
    result = ended(1, ["bash", "-c", f"{check} --nobody"], tmp_path, path)
    assert "FAIL     the script ends: ValueError: no data (train.py:3)" in result.stdout
