"""The guide's session on a practice cluster, typed into a real terminal."""

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from clusters import ON_A_CLUSTER, clone_into, in_the_guide
from support.jobs import environment
from support.positions import ON_RANK_1, at
from support.results import same_bits, shape
from support.scripts import ROOT, SMALL, edit

pexpect = pytest.importorskip("pexpect", reason="pip install -r slurm/requirements.txt")

PROMPT = "login$ "
SECTION = in_the_guide(r"^## Practise on your own machine\n((?s:.*))")
SHOWN = "".join(re.findall(r"^```console\n(.*?)^```$", SECTION, re.M | re.S))
SESSION = [piece.split("\n", 1) for piece in re.split(r"^(?:login)?\$ ", SHOWN, flags=re.M)[1:]]
LOOKING = ("scontrol", "grep")  # repeated until they show it
ARGS = ("6", *SMALL)

# In the tested copy of step 4, rank 1 waits for SIGTERM, so no run is over before it is disturbed:
# in the first life of the job after three epochs, and in the second after five.
UNTIL_TOLD = "while not stop_signals:\n    time.sleep(0.01)"

SLOW = pytest.mark.slow


class Terminal(pexpect.spawn):
    """A shell on the login node."""

    def prompt(self):
        """Wait for the prompt; return what was printed before it."""
        self.expect_exact(PROMPT)
        return self.before.replace("\r", "")

    def run(self, command):
        """Type a command; return its output."""
        self.sendline(command)
        return self.prompt().partition("\n")[2]

    def end(self, how):
        """End the shell with `how`, check that no process is left, and return the exit code."""
        processes = psutil.Process(self.pid).children(recursive=True)
        assert {"munged", "slurmctld", "slurmd", "bash"} <= {each.name() for each in processes}
        how()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive
        return self.wait()


def as_letters(number):
    return "i" * int(number[0])


def shows(screen, expected):
    """Return whether the screen has these lines in this order.

    Numbers and reasons may differ, but not the numbers of epochs.
    """
    screen, expected = (re.sub(r"\(.+\)$", "()", text, flags=re.M) for text in (screen, expected))
    screen, expected = (re.sub(r"(?<=epoch )\d+", as_letters, text) for text in (screen, expected))
    lines = iter(shape(screen))
    expected = [line for line in shape(expected.replace("ada", "root")) if line not in ("", "...")]
    return all(line in lines for line in expected)


@pytest.fixture
def clone():
    """A clone in a folder that other users can read; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        clone = clone_into(Path(name) / "clone")
        for life, epoch in enumerate((3, 5)):
            now = f"{ON_RANK_1} and os.environ.get('SLURM_RESTART_COUNT', '0') == '{life}'"
            edit(clone / "04_multinode.py", *at(epoch, 15, UNTIL_TOLD, when=now))
        yield clone


@pytest.fixture
def start(clone):
    """Return a function that starts the program, which must leave nothing behind."""
    temporary = clone.parent / "tmp"
    temporary.mkdir()
    with contextlib.ExitStack() as stack:

        def start(user="0"):
            variables = {"SUDO_UID": user, "TMPDIR": str(temporary), "TERM": "dumb"}
            command = SESSION[0][0].removeprefix("sudo ")
            options = {"env": environment(**variables), "encoding": "utf-8", "timeout": 300}
            terminal = Terminal(command, cwd=clone, dimensions=(50, 200), **options)
            stack.callback(terminal.close)
            stack.callback(terminal.kill, signal.SIGTERM)
            terminal.welcome = terminal.prompt()
            return terminal

        yield start
    end = time.monotonic() + 30
    while list(temporary.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert str(clone) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


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
        if last := re.search(r"^(epoch \d+|accuracy) .*\n\^C", output, re.MULTILINE):
            terminal.sendline(command)
            terminal.expect(f"{last[1]} .*\n")
            screen = f"{terminal.before}{terminal.after}".replace("\r", "")
            assert shows(screen, output.replace("^C", "")), screen
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
    """The user's jobs do, too. A cable can be pulled and plugged in."""
    user = pwd.getpwnam("nobody")
    os.chown(clone, user.pw_uid, user.pw_gid)
    terminal = start(str(user.pw_uid))
    assert terminal.run("id -un") == "nobody\n"
    assert "Submitted" in terminal.run("sbatch --wait --output=job.out --wrap='id -un; id -Gn'")
    assert (clone / "job.out").read_text(encoding="utf-8") == "nobody\nnogroup\n"
    reach = "timeout 1 bash -c ': < /dev/tcp/node2/6818' && echo reached"
    assert terminal.run(reach) == "reached\n"
    assert terminal.run(f"pull-cable node2; {reach}") == ""
    terminal.run("plug-in node2")
    assert "reached" in terminal.run(f"for n in {{1..30}}; do {reach} && break; done")
    assert terminal.run("power-off node3") == "usage: power-off NODE, one of node1, node2\n"
    terminal.end(terminal.sendeof)  # Ctrl-D


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="apt-get install shellcheck")
def test_shellcheck():
    practice = ROOT / "slurm" / "practice"
    programs = [ROOT / ".ci" / "run", practice / "shell.rc", *practice.glob("*.sh")]
    batch = [ROOT / "slurm" / "checks.sh", *ROOT.glob("*/*.sbatch")]
    subprocess.run(["shellcheck", "--exclude=SC1091", *programs, *batch], check=True)
