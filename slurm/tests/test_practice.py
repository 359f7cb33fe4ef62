"""The guide's session on a practice cluster, typed into a real terminal."""

import contextlib
import fcntl
import os
import pty
import pwd
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import psutil
import pytest
from clusters import ON_A_CLUSTER
from support.jobs import environment, run
from support.results import shape
from support.scripts import ROOT, SMALL, edited

PROMPT = "login$ "
GUIDE = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## Practise on your own machine\n(.*?)^## ", GUIDE, re.M | re.S)[1]
SHOWN = "".join(re.findall(r"^```console\n(.*?)^```$", SECTION, re.M | re.S))
SESSION = [piece.split("\n", 1) for piece in re.split(r"^(?:login)?\$ ", SHOWN, flags=re.M)[1:]]

LOOKING = ("sinfo", "squeue", "scontrol", "grep")  # repeated until they show it
FEWER = (" 60", f" 6 {' '.join(SMALL)}")

# In the tested copy of step 4, rank 1 waits for SIGTERM, so no run is over before it is disturbed:
# in the first attempt after three epochs, and in the second after five.
STEP = "            total[0] += self._run_batch(source, targets)\n"
GATE = f"""\
            life = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
            if dist.get_rank() == 1 and step == 15 and (life, self.epochs_run) in [(0, 3), (1, 5)]:
                while not stop_signals:
                    time.sleep(0.01)
{STEP}"""

SLOW = pytest.mark.slow


class Terminal:
    """A program in its own terminal; leaving the `with` block kills the program."""

    def __init__(self, command, cwd, variables):
        self.keyboard, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            cwd=cwd,
            env=environment(TERM="dumb", **variables),
            stdin=screen,
            stdout=screen,
            stderr=screen,
        )
        os.close(screen)
        self.screen = ""  # the output since the last input

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self):
        if self.keyboard is not None:
            os.close(self.keyboard)
        self.keyboard = None

    def _read(self):
        """Return whether there may be more to read."""
        if select.select([self.keyboard], [], [], 0.1)[0]:
            try:
                self.screen += os.read(self.keyboard, 65536).decode().replace("\r", "")
            except OSError:  # no process has the terminal open any more
                return False
        return True

    def wait_for(self, ready, timeout=300):
        """Read until `ready(screen)` is true; return the screen."""
        end = time.monotonic() + timeout
        while not ready(self.screen):
            if time.monotonic() > end or not self._read():
                pytest.fail(f"it did not happen:\n{self.screen}")
        return self.screen

    def prompt(self):
        return self.wait_for(lambda screen: screen.endswith(PROMPT)).removesuffix(PROMPT)

    def type(self, keys):
        self.screen = ""
        os.write(self.keyboard, keys.encode())

    def run(self, command):
        """Type a command; return its output."""
        self.type(f"{command}\n")
        return self.prompt().partition("\n")[2]


def shows(screen, expected):
    """Return whether the screen has these lines in this order, except for numbers and reasons."""
    screen, expected = (re.sub(r"\(.+\)$", "()", text, flags=re.M) for text in (screen, expected))
    lines = iter(shape(screen))
    return all(line in lines for line in shape(expected.replace("ada", "root")) if line != "...")


@pytest.fixture
def folder():
    """A temporary folder; pytest's own ones are closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def clone(folder):
    """A copy of the repository with a virtual environment, like a reader's."""
    clone = folder / "clone"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "slurm", clone / "slurm", ignore=ignored)
    edited(clone, "04", (STEP, GATE))
    (clone / ".venv" / "bin").mkdir(parents=True)
    activate = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    (clone / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")
    return clone


@pytest.fixture
def start(folder, clone):
    """Return a function that starts the program, which must leave nothing behind."""
    temporary = folder / "tmp"
    temporary.mkdir(mode=0o755)
    with contextlib.ExitStack() as stack:

        def start(user="0"):
            command = SESSION[0][0].removeprefix("sudo ").split()
            variables = {"SUDO_UID": user, "TMPDIR": str(temporary)}
            terminal = stack.enter_context(Terminal(command, clone, variables))
            terminal.prompt()
            return terminal

        yield start
    assert not list(temporary.iterdir())
    assert str(temporary) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


LATE = "node2 boots when Slurm has marked it down, within a minute ...\n"


def ended(terminal, end):
    """End the program with `end`, check that it leaves no process, and return its exit code."""
    processes = psutil.Process(terminal.process.pid).children(recursive=True)
    assert {"munged", "slurmctld", "slurmd", "bash"} <= {process.name() for process in processes}
    end()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    return terminal.process.wait(timeout=30)


@SLOW
@ON_A_CLUSTER
def test_the_session_of_the_guide(clone, start):
    """As shown, but with fewer epochs and a smaller model."""
    files = set(clone.rglob("*"))
    terminal = start()
    assert shows(terminal.screen, SESSION[0][1]), terminal.screen
    for command, output in SESSION[1:-1]:
        if output.endswith("^C\n"):
            terminal.type(f"{command}\n")
            until = output.removesuffix("^C\n")
            terminal.wait_for(lambda screen, until=until: shows(screen, until))
            terminal.type("\x03")
            terminal.prompt()
            continue
        end = time.monotonic() + 120
        while not shows(screen := terminal.run(command.replace(*FEWER)), output):
            assert command.split()[0] in LOOKING and time.monotonic() < end, (command, screen)
            time.sleep(0.5)  # a reader would look again, too
    assert SESSION[-1] == ["exit", ""]
    assert ended(terminal, lambda: terminal.type("exit\n")) == 0
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
    for harm, repair in (("pull-cable", "plug-in"), ("power-off", "power-on")):
        assert terminal.run(f"{harm} node2") == ""
        assert terminal.run(reach) == ""
        said = terminal.run(f"{repair} node2")
        assert said == (LATE if repair == "power-on" else "")
        assert "reached" in terminal.run(f"for n in {{1..30}}; do {reach} && break; done")
    for words in ("power-off", "power-on node3", "pull-cable node1 node2"):
        assert terminal.run(words) == f"usage: {words.split()[0]} NODE, one of node1, node2\n"
    assert ended(terminal, lambda: terminal.type("\x04")) == 0  # Ctrl-D


@SLOW
@ON_A_CLUSTER
def test_power_on_comes_after_slurm_has_given_the_node_up(start):
    """Typed at once, it still lets Slurm requeue the job. If the node is on, it does nothing."""
    terminal = start()
    assert terminal.run("power-on node2") == ""
    terminal.run("sbatch --nodes=2 --output=job.out --wrap='srun bash -c \"echo runs; sleep 600\"'")
    terminal.run("until [ $(grep -sc runs job.out) = 2 ]; do sleep 0.1; done")
    assert terminal.run("power-off node2") == ""
    terminal.type("power-on node2\n")
    terminal.wait_for(lambda screen: LATE in screen)
    terminal.type("\x03")  # the node boots anyway
    terminal.prompt()
    assert terminal.run("power-on node2") == ""
    show = "scontrol show job 1 | grep -oE '(JobState|Restarts)=[A-Z0-9]+'"
    running = f"for n in {{1..300}}; do {show} | grep -q PENDING || break; sleep 0.1; done; {show}"
    assert terminal.run(running) == "JobState=RUNNING\nRestarts=1\n"


@SLOW
@ON_A_CLUSTER
@pytest.mark.weekly
@pytest.mark.parametrize(
    "end",
    [
        lambda terminal: terminal.process.terminate(),
        lambda terminal: terminal.process.kill(),
        lambda terminal: terminal.close(),
    ],
    ids=["SIGTERM", "SIGKILL", "its terminal is closed"],
)
def test_it_is_ended_from_outside(start, end):
    terminal = start()
    terminal.type("sleep 60\n")
    ended(terminal, lambda: end(terminal))


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
    """Batch files use what may not exist: .venv and in_container."""
    practice = ROOT / "slurm" / "practice"
    programs = [ROOT / ".ci" / "run", practice / "shell.rc", *practice.glob("*.sh")]
    subprocess.run(["shellcheck", *programs], check=True)
    batch = ROOT.glob("*/*.sbatch")
    subprocess.run(["shellcheck", "--exclude=SC1091,SC2154", *batch], check=True)
