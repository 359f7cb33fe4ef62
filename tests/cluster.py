"""A real Slurm cluster on one machine: munged, slurmctld, and one slurmd per node.

Linux namespaces give each node its own network address, host name, mounts and processes, like a
separate machine; a bridge connects them. The controller runs in an outer namespace that holds
everything, so nothing is left when it ends. This needs root and Debian's packages (PACKAGES).
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

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
    ip -n node$number link set eth0 up
    bash {folder}/node.sh $number &
done
while :; do wait -n || sleep 0.2; done  # process 1 has to reap orphans
"""

NODE = """\
echo $$ > {folder}/node$1.pid
exec ip netns exec node$1 unshare --uts --mount --pid --fork --kill-child --mount-proc bash -c "
    mount --bind {folder}/hosts /etc/hosts
    hostname node$1
    slurmd -D & while :; do wait -n; [ \\$? = 127 ] && sleep 0.2; done"
"""


def missing():
    """Return why no cluster can run here, or None."""
    programs = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv"]
    if absent := [name for name in programs if not shutil.which(name)]:
        return f"{absent[0]} is not installed: apt-get install {PACKAGES}"
    if os.geteuid() != 0 or subprocess.call(["unshare", *SPACES, "--fork", "true"]):
        return "a Slurm cluster of namespaces needs root, and a kernel that allows them"
    return None


class Cluster:
    """A cluster that runs inside a `with` block; it dies with the thread that started it."""

    def __init__(self, folder, nodes=2, gpus=4, environment=os.environ):
        self.folder, self.nodes, self.gpus = Path(folder), nodes, gpus
        self.environment = {**environment, "SLURM_CONF": f"{folder}/slurm.conf"}

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
                if self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(self.nodes):
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
        """Kill all processes of a node at once."""
        self.run("kill", "-KILL", self._node(number))

    def switch_on(self, number):
        """Start a node again that lost its power."""
        script = f"setsid bash {self.folder}/node.sh {number} > /dev/null 2>&1 < /dev/null &"
        self.run("bash", "-c", script)

    def cable(self, number, state):
        """Pull a node's network cable ("down") or plug it in again ("up")."""
        self.run("ip", "link", "set", f"cable{number}", state)


def child(pid):
    """Return the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
