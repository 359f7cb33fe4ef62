"""A real Slurm cluster on one machine: munged, slurmctld, and one slurmd per node.

Linux namespaces give each node its own network address, host name, mounts and processes, like a
separate machine; a bridge connects them. The controller runs in an outer namespace that holds
everything, so nothing is left when it ends. This needs root and Debian's packages (PACKAGES).

The tests use the class Cluster. Run as a program, this file opens a shell on the login node of a
cluster to practise on.
"""

import argparse
import contextlib
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2"
NETWORK = "10.77.0"
SPACES = ["--net", "--uts", "--mount", "--pid"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

SLURM_CONF = """\
ClusterName=ladder
SlurmctldHost=login({network}.254)
SlurmUser=root
AuthType=auth/munge
# Credentials that expire early let a requeued job start after 5 seconds instead of 2 minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# Allow nodes with more cores than this machine has.
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1,bf_interval=1
ReturnToService=2
KillWait=10
SlurmdTimeout=15
NodeName=node[1-{nodes}] CPUs=256 RealMemory=100000 Gres=gpu:{gpus}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE
"""

# Runs as process 1 of the outer namespaces and sets up the network, the controller and the nodes.
CONTROLLER = """\
set -e
for gpu in /dev/nvidia* /dev/dxg /dev/kfd; do  # hide real GPUs: Slurm lends out names only
    [ ! -c $gpu ] || mount --bind /dev/null $gpu
done
mount -t tmpfs none /run
mount --bind {folder}/hosts /etc/hosts
hostname login
ip link set lo up
ip link add bridge0 type bridge
ip address add {network}.254/24 dev bridge0
ip link set bridge0 up
munged --force --key-file={folder}/munge.key --socket={folder}/munge.socket \\
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed
slurmctld
for number in $(seq {nodes}); do
    ip netns add node$number
    ip link add cable$number type veth peer name eth0 netns node$number
    ip link set cable$number master bridge0 up
    ip -n node$number link set lo up
    ip -n node$number address add {network}.$number/24 dev eth0
    bash {folder}/node.sh $number &
done
while :; do wait -n || sleep 0.2; done  # process 1 has to reap orphans
"""

NODE = """\
echo $$ > {folder}/node$1.pid
ip -n node$1 link set eth0 up
exec ip netns exec node$1 unshare --uts --mount --pid --fork --kill-child --mount-proc bash -c "
    mount --bind {folder}/hosts /etc/hosts
    hostname node$1
    slurmd -D & while :; do wait -n; [ \\$? = 127 ] && sleep 0.2; done"
"""


def with_sbin(environment):
    """Return a PATH with the folders that ordinary users, and root after `su`, may lack."""
    return f"{environment.get('PATH', '')}:/usr/sbin:/sbin"


def missing():
    """Return why no cluster can run here, or None."""
    programs = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv"]
    if absent := [name for name in programs if not shutil.which(name, path=with_sbin(os.environ))]:
        return f"{absent[0]} is not installed: apt-get install {PACKAGES}"
    if os.geteuid() != 0 or subprocess.call(["unshare", *SPACES, "--fork", "true"]):
        return "a Slurm cluster of namespaces needs root, and a kernel that allows them"
    return None


class Cluster:
    """A cluster that runs inside a `with` block; it dies with the thread that started it."""

    def __init__(self, folder, nodes=2, gpus=4, environment=os.environ):
        self.folder, self.nodes, self.gpus = Path(folder), nodes, gpus
        slurm = {"PATH": with_sbin(environment), "SLURM_CONF": f"{folder}/slurm.conf"}
        self.environment = {**environment, **slurm}

    def __enter__(self):
        self._write_files()
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "--fork", "--kill-child"]
        with (self.folder / "controller.log").open("wb") as log:
            self.outer = subprocess.Popen(
                [*alone, "--mount-proc", "bash", self.folder / "controller.sh"],
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
        values = {"folder": self.folder, "network": NETWORK, "nodes": self.nodes, "gpus": self.gpus}
        (self.folder / "state").mkdir()
        names = [f"{NETWORK}.254 login", "127.0.0.1 localhost"]
        for number in range(1, self.nodes + 1):
            (self.folder / f"spool-node{number}").mkdir()
            names.append(f"{NETWORK}.{number} node{number}")
        for number in range(self.gpus):  # Slurm needs a device file for each
            (self.folder / f"gpu{number}").symlink_to("/dev/null")
        gpus = f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{self.gpus - 1}]\n"
        files = {
            "slurm.conf": SLURM_CONF.format(**values),
            "gres.conf": gpus,
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": "\n".join([*names, ""]),
            "controller.sh": CONTROLLER.format(**values),
            "node.sh": NODE.format(**values),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)

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

    def sbatch(self, *words, cwd):
        """Submit a job; return its ID."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd))

    def show(self, job):
        """Return what Slurm knows about a job."""
        shown = self.run("scontrol", "show", "job", "-o", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job, *states, timeout=180):
        """Wait until a job is in one of these states, by default a final one; return it."""
        end = time.monotonic() + timeout
        while (state := self.show(job)["JobState"]) not in (states or ENDED):
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} is {state}")
            time.sleep(0.2)
        return state

    # ------------------------------------------------------------ accidents

    def _node(self, number):
        return (self.folder / f"node{number}.pid").read_text().strip()

    def cut_the_power(self, number):
        """Kill all processes of a node at once; the others do not hear that it is gone."""
        network = f"ip -n node{number} link set eth0 down"
        wait = f"while {self._is_on(number)}; do sleep 0.05; done"
        kill = f"{network} && kill -KILL {self._node(number)} && {wait}"
        self.run("timeout", "10", "bash", "-c", kill)

    def switch_on(self, number):
        """Start a node again that lost its power."""
        script = f"setsid bash {self.folder}/node.sh {number} > /dev/null 2>&1 < /dev/null &"
        wait = f"until {self._is_on(number)}; do sleep 0.05; done"
        self.run("timeout", "10", "bash", "-c", f"{self._is_on(number)} || {{ {script} {wait}; }}")

    def _is_on(self, number):
        return f"kill -0 $(cat {self.folder}/node{number}.pid) 2> /dev/null"

    def cable(self, number, state):
        """Pull a node's network cable ("down") or plug it in again ("up")."""
        self.run("ip", "link", "set", f"cable{number}", state)


def child(pid):
    """Return the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


# ---------------------------------------------------------------- a shell to practise in

FAULTS = {
    "power-off": Cluster.cut_the_power,
    "power-on": Cluster.switch_on,
    "pull-cable": lambda cluster, number: cluster.cable(number, "down"),
    "plug-in": lambda cluster, number: cluster.cable(number, "up"),
}

DESCRIPTION = """\
Start a Slurm cluster on this machine, and open a shell on its login node. The shell starts in the
repository: try sinfo, and sbatch slurm/04_multinode.sbatch. Nothing is left of the cluster when you
leave the shell. slurm/README.md shows a job that survives a lost node."""

HELP = """\
Besides the commands of Slurm, the shell has five that cause trouble:
  power-off NODE    end everything on a node at once
  power-on NODE     boot it again
  pull-cable NODE   cut a node off the network
  plug-in NODE      connect it again
  preempt JOB       send SIGTERM, as Slurm does to a job that it preempts with a grace time"""

WELCOME = """\
{version} with {nodes} nodes of {gpus} GPUs each. This shell is on the login node.

Real: Slurm, and for each node a network address, a host name and processes of its own.
Not real: the GPUs, which are only names, so the scripts train on the CPU over gloo. All nodes share
the cores and the file system of this machine, and none of them reaches the internet.

{help}

Jobs run as {user}. Ctrl-D or exit ends the cluster and its jobs, and leaves the files they wrote.
"""

# The shell belongs to the user who called sudo. What needs root, it asks this program for.
SHELL = """\
PS1='login$ '
unset HISTFILE
export SLURM_CONF={folder}/slurm.conf
export OMP_NUM_THREADS=1  # all nodes share the cores of this machine
ask() {{ echo "$@" > {folder}/ask; cat {folder}/answer; }}
for verb in {verbs}; do alias $verb="ask $verb"; done
preempt() {{ scancel --signal=TERM "$@"; }}
cd {root}
"""


@contextlib.contextmanager
def temporary_folder():
    """Make a folder that another process removes once this one has ended, even if it was killed."""
    folder = tempfile.mkdtemp(prefix="cluster-")
    os.chmod(folder, 0o755)
    remove = 'cat; for _ in $(seq 50); do rm -rf "$0" && exit; sleep 0.1; done'
    with subprocess.Popen(
        ["sh", "-c", remove, folder],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        yield Path(folder)


def serve_faults(cluster):
    """Do to the nodes what the shell asks for."""
    numbers = {f"node{number}": number for number in range(1, cluster.nodes + 1)}
    while True:
        verb, *names = (cluster.folder / "ask").read_text(encoding="utf-8").split()
        answer = ""
        if number := numbers.get(" ".join(names)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it has said why
                FAULTS[verb](cluster, number)
        else:
            answer = f"usage: {verb} NODE, one of {', '.join(numbers)}\n"
        (cluster.folder / "answer").write_text(answer, encoding="utf-8")


def open_shell(cluster, user):
    """Give the user a shell on the login node."""
    folder = cluster.folder
    for name in ("ask", "answer"):
        os.mkfifo(folder / name, 0o600)
        os.chown(folder / name, user.pw_uid, user.pw_gid)
    threading.Thread(target=serve_faults, args=[cluster], daemon=True).start()
    start = SHELL.format(folder=folder, verbs=" ".join(FAULTS), root=shlex.quote(str(ROOT)))
    (folder / "shell").write_text(start, encoding="utf-8")
    print(
        WELCOME.format(
            version=cluster.run("sinfo", "--version").strip(),
            nodes=cluster.nodes,
            gpus=cluster.gpus,
            help=HELP,
            user=user.pw_name,
        ),
        flush=True,
    )
    enter = ["nsenter", *SPACES, "-t", str(child(cluster.outer.pid))]
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
    bash = ["--reset-env", "bash", "--rcfile", folder / "shell", "-i"]
    subprocess.run([*enter, *become, *bash], check=False)


def positive_int(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def main():
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter, description=DESCRIPTION, epilog=HELP
    )
    parser.add_argument("--nodes", type=positive_int, default=2, help="default: 2")
    parser.add_argument("--gpus", type=positive_int, default=4, help="per node; default: 4")
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.umask(0o022)  # the user has to read slurm.conf
    user = pwd.getpwuid(int(os.environ.get("SUDO_UID", "0")))
    with temporary_folder() as folder, Cluster(folder, args.nodes, args.gpus) as cluster:
        open_shell(cluster, user)


if __name__ == "__main__":
    main()
