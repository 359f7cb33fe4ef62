"""A real Slurm cluster on one machine: munged, slurmctld, and one slurmd per node.

Linux namespaces give each node its own network address, host name, mounts and processes, like a
separate machine; a bridge connects them. The controller runs in an outer namespace that holds
everything, so nothing is left when it ends. This needs root and the packages in packages.txt.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent

NETWORK = "10.77.0"
SPACES = ["--net", "--uts", "--mount", "--pid"]


def with_sbin(environment):
    """Return a PATH with the folders that ordinary users, and root after `su`, may lack."""
    return f"{environment.get('PATH', '')}:/usr/sbin:/sbin"


def missing():
    """Return why no cluster can run here, or None."""
    programs = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv"]
    if absent := [name for name in programs if not shutil.which(name, path=with_sbin(os.environ))]:
        packages = " ".join((HERE / "packages.txt").read_text(encoding="utf-8").split())
        return f"{absent[0]} is not installed: apt-get install {packages}"
    if os.geteuid() != 0 or subprocess.call(["unshare", *SPACES, "--fork", "true"]):
        return "a Slurm cluster in namespaces needs root, and a kernel that allows namespaces"
    return None


class Cluster:
    """A cluster that runs inside a `with` block; it ends with the thread that started it."""

    def __init__(self, folder, nodes=2, gpus=4, environment=os.environ):
        self.folder, self.nodes, self.gpus = Path(folder), nodes, gpus
        slurm = {"PATH": with_sbin(environment), "SLURM_CONF": f"{folder}/slurm.conf"}
        self.environment = {**environment, **slurm}

    def __enter__(self):
        self._write_files()
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "--fork", "--kill-child"]
        program = ["bash", self.folder / "controller.sh", self.folder, NETWORK, str(self.nodes)]
        with (self.folder / "controller.log").open("wb") as log:
            self.outer = subprocess.Popen(
                [*alone, "--mount-proc", *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        try:
            self.wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError, IndexError):
            os.kill(child(self.outer.pid), 9)
        self.outer.wait()

    def _write_files(self):
        (self.folder / "state").mkdir()
        names = [f"{NETWORK}.254 login", "127.0.0.1 localhost"]
        for number in range(1, self.nodes + 1):
            (self.folder / f"spool-node{number}").mkdir()
            names.append(f"{NETWORK}.{number} node{number}")
        (self.folder / "hosts").write_text("\n".join([*names, ""]), encoding="utf-8")
        for number in range(self.gpus):  # Slurm needs a device file for each
            (self.folder / f"gpu{number}").symlink_to("/dev/null")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        values = {"folder": self.folder, "network": NETWORK, "nodes": self.nodes}
        values |= {"gpus": self.gpus, "last_gpu": self.gpus - 1}
        for path in HERE.glob("*.conf"):
            text = Template(path.read_text(encoding="utf-8")).substitute(values)
            (self.folder / path.name).write_text(text, encoding="utf-8")
        for path in HERE.glob("*.sh"):
            shutil.copy(path, self.folder)

    def wait_until_idle(self, timeout=60):
        """Wait until every node can take a job."""
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(subprocess.CalledProcessError, OSError, IndexError):
                idle = self.run("bash", "-c", "sinfo -h -t idle -o %D 2> /dev/null")
                if idle.strip() == str(self.nodes):
                    return
            if self.outer.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self.folder / "controller.log").read_text())
            time.sleep(0.05)

    # ------------------------------------------------------------ commands

    def run(self, *words, node=None, cwd="/"):
        """Run a command on the login node, or on the node with this number; return its output."""
        enter = ["nsenter", *SPACES, "-t", str(child(self.outer.pid))]
        there = f"cd {shlex.quote(str(cwd))} && {shlex.join(map(str, words))}"
        if node:
            pid = f"$(cat /proc/{self._node(node)}/task/*/children)"
            there = f"nsenter {' '.join(SPACES)} -t {pid} bash -c {shlex.quote(there)}"
        command = [*enter, "bash", "-c", there]
        return subprocess.run(
            command, check=True, env=self.environment, stdout=subprocess.PIPE, text=True
        ).stdout

    # ------------------------------------------------------------ accidents

    def _node(self, number):
        return (self.folder / f"node{number}.pid").read_text().strip()

    def shut_down(self, number):
        """Kill all processes of a node at once; its kernel closes their connections."""
        wait = f"while {self._alive(number)}; do sleep 0.05; done"
        kill = f"kill -KILL {self._node(number)} && {wait}"
        self.run("timeout", "10", "bash", "-c", kill)

    def cut_the_power(self, number):
        """Kill all processes of a node at once; the other nodes are not told."""
        self.run("ip", "-n", f"node{number}", "link", "set", "eth0", "down")
        self.shut_down(number)

    def switch_on(self, number):
        """Boot a node that lost its power."""
        node = f"bash {self.folder}/node.sh {self.folder} {number}"
        script = f"setsid {node} > /dev/null 2>&1 < /dev/null &"
        wait = f"until {self._alive(number)}; do sleep 0.05; done"
        if not self.is_on(number):
            self.run("timeout", "10", "bash", "-c", f"{script} {wait}")

    def is_on(self, number):
        """Return whether the node has power."""
        alive = f"{self._alive(number)} && echo on || true"
        return bool(self.run("bash", "-c", alive))

    def _alive(self, number):
        return f"kill -0 $(cat {self.folder}/node{number}.pid) 2> /dev/null"

    def is_down(self, number):
        """Return whether Slurm has marked the node down."""
        return "down" in self.run("sinfo", "-hN", f"--nodes=node{number}", "-o%T")

    def cable(self, number, state):
        """Pull a node's network cable ("down") or plug it in again ("up")."""
        self.run("ip", "link", "set", f"cable{number}", state)


def child(pid):
    """Return the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
