"""Three machines in network namespaces, connected by a bridge."""

import subprocess
import sys
from pathlib import Path

import pytest
from practice.cluster import missing
from support.jobs import Job

LIVE, DEAD = "10.88.0", "10.99.0"  # the networks of eth0 and of eth1, whose cable leads nowhere

# Each machine is a network namespace; a bridge connects them. They end with the last process.
MACHINES = f"""\
set -e
mount -t tmpfs none /run
ip link add bridge0 type bridge
ip link set bridge0 up
for number in 1 2 3; do
    ip netns add node$number
    ip link add cable$number type veth peer name eth0 netns node$number
    ip link set cable$number master bridge0 up
    inside="ip -n node$number"
    $inside link add eth1 type veth peer name nowhere
    for interface in lo eth0 eth1 nowhere; do $inside link set $interface up; done
    $inside address add {LIVE}.$number/24 dev eth0
    $inside address add {DEAD}.$number/24 dev eth1
done
echo ready
exec sleep infinity
"""


def ended(*jobs, code=0):
    """Wait until these jobs have ended with this exit code, and left no process."""
    for job in jobs:
        assert job.wait().returncode == code, job
        job.wait_until_gone()


class Machines:
    """Three machines, whose names get the addresses that a test chooses."""

    def __init__(self, holder):
        self.holder, self.hosts = holder, holder.cwd / "hosts"

    def names(self, networks):
        """Write the hosts file from {host name pattern: network of its addresses}."""
        lines = ["127.0.0.1 localhost"]
        for name, network in networks.items():
            lines += [f"{network}.{n} {name.format(n, n - 1)}" for n in (1, 2, 3)]
        self.hosts.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def inside(self, number, *words):
        """Return a command that runs these words in a machine's network."""
        enter = f"nsenter --net --mount -t{self.holder.process.pid} ip netns exec node{number}"
        return [*enter.split(), *words]

    def terminal(self, number, command, folder):
        """Start a command on a machine; return the Job."""
        lines = [
            f"mount --bind {self.hosts} /etc/hosts && hostname node{number} && cd {folder} || exit",
            f"export PATH={Path(sys.executable).parent}:$PATH SLURM_NODEID={number - 1}",
            command,
        ]
        words = self.inside(number, "unshare", "--uts", "--mount", "bash", "-c", "\n".join(lines))
        return Job(words, folder)

    def on_both(self, command, folder, code=0, meanwhile=lambda one, two: None):
        """Run a command on two machines, as `srun` does, until both end with this exit code."""
        with self.terminal(1, command, folder) as one, self.terminal(2, command, folder) as two:
            meanwhile(one, two)
            ended(one, two, code=code)
        return one, two

    def listening(self, number):
        """Return the listening sockets of a machine: {port: address}."""
        shown = subprocess.check_output(self.inside(number, "ss", "-Hltn"), text=True)
        places = [line.split()[3].rsplit(":", 1) for line in shown.splitlines()]
        return {int(port): address for address, port in places}


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
    command = [*ends_with_us, "unshare", "--net", "--mount", "bash", "-c", MACHINES]
    with Job(command, tmp_path_factory.mktemp("machines")) as holder:
        holder.wait_for("ready")
        yield holder


@pytest.fixture
def machines(holder):
    machines = Machines(holder)
    machines.names({"node{}": LIVE})
    return machines
