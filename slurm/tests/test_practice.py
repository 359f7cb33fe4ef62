"""The guide's session on a practice cluster, typed into a real terminal."""

import os
import pwd
import re
import tempfile
from pathlib import Path

import psutil
import pytest
from clusters import ON_A_CLUSTER, clone_into, in_the_guide
from support.jobs import environment
from support.positions import ON_RANK_1, at
from support.results import same_bits
from support.scripts import SMALL, edit

pexpect = pytest.importorskip("pexpect", reason="pip install -r slurm/requirements.txt")

SECTION = in_the_guide(r"^## Practise on your own machine\n((?s:.*))")
SHOWN = "".join(re.findall(r"^```console\n(.*?)^```$", SECTION, re.M | re.S))
SESSION = [piece.split("\n", 1) for piece in re.split(r"^(?:login)?\$ ", SHOWN, flags=re.M)[1:]]
ARGS = ("6", *SMALL)

# In the tested copy of step 4, rank 1 waits for SIGTERM, so no run is over before it is disturbed:
# in the first life of the job after three epochs, and in the second after five.
UNTIL_TOLD = "while not stop_signals:\n    time.sleep(0.01)"
HAS_ENDED = "until scontrol show job 1 | grep -q COMPLETED; do sleep 0.5; done"

pytestmark = [ON_A_CLUSTER, pytest.mark.slow]


class Terminal(pexpect.spawn):
    """A shell on the login node."""

    def prompt(self):
        """Wait for the prompt; return what was printed before it."""
        self.expect_exact("login$ ")
        return self.before.replace("\r", "")

    def run(self, command):
        """Type a command; return its output."""
        self.sendline(command)
        return self.prompt().partition("\n")[2]

    def shows(self, lines):
        """Wait for these lines, in this order; numbers may differ, but not those of epochs."""
        for line in lines.replace("ada", "root").splitlines():
            if line not in ("", "...", "^C"):
                words = re.split(r"(?<!epoch )\b\d[\d,.]*", line)
                self.expect(r"\d[\d,.]*".join(map(re.escape, words)))

    def end(self, how):
        """End the shell with `how`; check that no process and no temporary file is left."""
        processes = psutil.Process(self.pid).children(recursive=True)
        assert {"munged", "slurmctld", "slurmd", "bash"} <= {each.name() for each in processes}
        how()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive
        assert self.wait() == 0
        assert [*self.cwd.parent.iterdir()] == [self.cwd]


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


def started(clone, user="0"):
    """Return a terminal in which the guide's command has been typed by this user of sudo."""
    env = environment(SUDO_UID=user, TMPDIR=str(clone.parent), TERM="dumb")
    options = {"env": env, "encoding": "utf-8", "timeout": 300, "dimensions": (50, 200)}
    return Terminal(SESSION[0][0].removeprefix("sudo "), cwd=clone, **options)


def test_the_session_of_the_guide(clone, trained):
    """As shown, but with fewer epochs and a smaller model; it ends like an undisturbed run."""
    files = set(clone.rglob("*"))
    with started(clone) as terminal:
        terminal.shows(SESSION[0][1])
        terminal.prompt()
        for typed, output in SESSION[1:-1]:
            if typed == "rm practice*":
                assert same_bits(clone / "practice.pt", trained("03", *ARGS))
            if typed.startswith("scontrol"):
                terminal.run(HAS_ENDED)
            terminal.sendline(typed.replace(" 60", f" {' '.join(ARGS)}"))
            terminal.shows(output)
            if "^C" in output:
                terminal.sendintr()
            terminal.prompt()
        terminal.end(lambda: terminal.sendline(SESSION[-1][0]))
    assert set(clone.rglob("*")) == files


def test_the_shell_belongs_to_the_user_of_sudo(clone):
    """The user's jobs do, too. A cable can be pulled and plugged in."""
    user = pwd.getpwnam("nobody")
    os.chown(clone, user.pw_uid, user.pw_gid)
    with started(clone, str(user.pw_uid)) as terminal:
        terminal.prompt()
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
