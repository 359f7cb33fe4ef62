"""The guide's session on a practice cluster, typed into a real terminal."""

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from clusters import ON_A_CLUSTER, clone_into
from support.jobs import environment, run
from support.results import same_bits, shape
from support.scripts import ROOT, SMALL, edit

pexpect = pytest.importorskip("pexpect", reason="pip install -r slurm/requirements.txt")

PROMPT = "login$ "
GUIDE = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## Practise on your own machine\n(.*?)^## ", GUIDE, re.M | re.S)[1]
SHOWN = "".join(re.findall(r"^```console\n(.*?)^```$", SECTION, re.M | re.S))
SESSION = [piece.split("\n", 1) for piece in re.split(r"^(?:login)?\$ ", SHOWN, flags=re.M)[1:]]
LOOKING = ("sinfo", "squeue", "scontrol", "grep")  # repeated until they show it
ARGS = ("6", *SMALL)

# In the tested copy of step 4, rank 1 waits for SIGTERM, so no run is over before it is disturbed:
# in the first attempt after three epochs, and in the second after five.
STEP = "            total[0] += self._run_batch(source, targets)\n"
GATE = f"""\
            life = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
            if dist.get_rank() == 1 and step == 15 and (life, self.epochs_run) in [(0, 3), (1, 5)]:
                while not stop_signals:
                    time.sleep(0.01)
{STEP}"""
LATE = "node2 boots when Slurm has marked it down, within a minute ...\n"

SLOW = pytest.mark.slow
pytestmark = pytest.mark.xdist_group("practice")  # its tests mostly wait


class Terminal(pexpect.spawn):
    """A shell on the login node."""

    def seen(self):
        return self.before.replace("\r", "")

    def prompt(self):
        """Wait for the prompt; return what was printed before it."""
        self.expect_exact(PROMPT)
        return self.seen()

    def run(self, command):
        """Type a command; return its output."""
        self.sendline(command)
        return self.prompt().partition("\n")[2]

    def end(self, how):
        """End the shell with `how`, check that no process is left, and return its exit code."""
        processes = psutil.Process(self.pid).children(recursive=True)
        assert {"munged", "slurmctld", "slurmd", "bash"} <= {each.name() for each in processes}
        how()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive
        return self.wait() if not self.closed else None


def shows(screen, expected):
    """Return whether the screen has these lines in this order, except for numbers and reasons."""
    screen, expected = (re.sub(r"\(.+\)$", "()", text, flags=re.M) for text in (screen, expected))
    lines = iter(shape(screen))
    return all(line in lines for line in shape(expected.replace("ada", "root")) if line != "...")


@pytest.fixture
def folder():
    """A folder for a clone and for temporary files; pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        (Path(name) / "tmp").mkdir(mode=0o755)
        yield Path(name)


@pytest.fixture
def clone(folder):
    clone = clone_into(folder / "clone")
    edit(clone / "04_multinode.py", STEP, GATE)
    return clone


@pytest.fixture
def start(folder, clone):
    """Return a function that starts the program, which must leave nothing behind."""
    with contextlib.ExitStack() as stack:

        def start(user="0"):
            variables = {"SUDO_UID": user, "TMPDIR": str(folder / "tmp"), "TERM": "dumb"}
            command = SESSION[0][0].removeprefix("sudo ")
            options = {"env": environment(**variables), "encoding": "utf-8", "timeout": 300}
            terminal = Terminal(command, cwd=clone, dimensions=(50, 200), **options)
            stack.callback(terminal.close)
            stack.callback(terminal.kill, signal.SIGTERM)
            terminal.welcome = terminal.prompt()
            return terminal

        yield start
    end = time.monotonic() + 30
    while list((folder / "tmp").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert str(folder) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


@SLOW
@ON_A_CLUSTER
def test_the_session_of_the_guide(clone, start, trained):
    """As shown, but with fewer epochs and a smaller model; it ends like an undisturbed run."""
    files = set(clone.rglob("*"))
    terminal = start()
    assert shows(terminal.welcome, SESSION[0][1]), terminal.welcome
    for typed, output in SESSION[1:-1]:
        command = typed.replace(" 60", f" {' '.join(ARGS)}")
        if command == "rm practice*":
            assert same_bits(clone / "practice.pt", trained("03", *ARGS))
        if output.endswith("^C\n"):
            terminal.sendline(command)
            for line in shape(output.removesuffix("^C\n")):
                if line != "...":
                    words = re.sub("#", r"[\\d,.]+", re.escape(line).replace(r"\#", "#"))
                    terminal.expect(words.replace(r"\ ", " +"))
            terminal.sendintr()
            terminal.prompt()
            continue
        end = time.monotonic() + 120
        while not shows(screen := terminal.run(command), output):
            assert command.split()[0] in LOOKING and time.monotonic() < end, (command, screen)
            time.sleep(0.5)  # a reader would look again, too
    assert SESSION[-1] == ["exit", ""]
    assert terminal.end(lambda: terminal.sendline("exit")) == 0
    assert set(clone.rglob("*")) == files


@SLOW
@ON_A_CLUSTER
def test_the_shell_belongs_to_the_user_of_sudo(clone, start):
    user = pwd.getpwnam("nobody")
    os.chown(clone, user.pw_uid, user.pw_gid)
    terminal = start(str(user.pw_uid))
    assert terminal.run("id -un") == "nobody\n"
    assert "Submitted" in terminal.run("sbatch --output=job.out --wrap='id -un; id -Gn'")
    terminal.run("for n in {1..600}; do grep -s nogroup job.out && break; sleep 0.1; done")
    assert (clone / "job.out").read_text(encoding="utf-8") == "nobody\nnogroup\n"
    assert (clone / "job.out").stat().st_uid == user.pw_uid

    reach = "timeout 1 bash -c ': < /dev/tcp/node2/6818' && echo reached"
    assert terminal.run(reach) == "reached\n"
    assert terminal.run("power-on node2") == ""  # it has power
    for harm, repair in (("pull-cable", "plug-in"), ("power-off", "power-on")):
        assert terminal.run(f"{harm} node2") == ""
        assert terminal.run(reach) == ""
        said = terminal.run(f"{repair} node2")
        assert said == (LATE if repair == "power-on" else "")
        assert "reached" in terminal.run(f"for n in {{1..30}}; do {reach} && break; done")
    for words in ("power-off", "power-on node3", "pull-cable node1 node2"):
        assert terminal.run(words) == f"usage: {words.split()[0]} NODE, one of node1, node2\n"
    assert terminal.end(terminal.sendeof) == 0  # Ctrl-D


@ON_A_CLUSTER
@pytest.mark.weekly("two more ways to end it; exit and Ctrl-D are shown above")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_is_ended_from_outside(start, number):
    terminal = start()
    terminal.sendline("sleep 60")
    terminal.end(lambda: os.kill(terminal.pid, number))


@SLOW
@ON_A_CLUSTER
def test_what_is_missing(tmp_path):
    """Without any program on PATH, and in a namespace where root is nobody."""
    command = [sys.executable, ROOT / "slurm" / "practice"]
    for start, path, reason in (
        ([], "", "sbatch is not installed: apt-get install slurmctld slurmd "),
        (["unshare", "--user"], os.environ["PATH"], "needs root"),
    ):
        job = run([*start, *command], tmp_path, {"PATH": path})
        assert (job.returncode, job.stdout, job.stderr.count("\n")) == (1, "", 1), job
        assert reason in job.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="apt-get install shellcheck")
def test_shellcheck():
    practice = ROOT / "slurm" / "practice"
    programs = [ROOT / ".ci" / "run", practice / "shell.rc", *practice.glob("*.sh")]
    batch = ROOT.glob("*/*.sbatch")
    subprocess.run(["shellcheck", "--exclude=SC1091", *programs, *batch], check=True)
