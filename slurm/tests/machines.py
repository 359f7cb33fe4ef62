"""The nodes of the cluster, used as machines without Slurm."""

import sys
from pathlib import Path

import pytest
from practice.cluster import NETWORK as LIVE
from practice.cluster import child, missing
from support.jobs import Job

# Of the cluster, a machine has the network, but not the processes, so it needs a /proc of its own.
MACHINE = """\
set -e
mount -t proc proc /proc
mount --bind {hosts} /etc/hosts
hostname {name}
cd {folder}
set +e
export PATH={python}:$PATH SLURM_NODEID={number}
{command}
"""


class Machines:
    """Two machines, node1 and node2, and the login node; a test chooses their names' addresses."""

    def __init__(self, cluster, folder):
        self.cluster, self.hosts = cluster, folder / "hosts"
        self.names({"node{}": LIVE})

    def names(self, networks):
        """Write the hosts file from {host name pattern: network of its addresses}."""
        lines = ["127.0.0.1 localhost", f"{LIVE}.254 login"]
        for name, network in networks.items():
            lines += [f"{network}.{n} {name.format(n, n - 1)}" for n in (1, 2)]
        self.hosts.write_text("\n".join([*lines, ""]), encoding="utf-8")

    def terminal(self, number, command, folder):
        """Start a command on a node or, without a number, on the login node; return the Job."""
        name, python = f"node{number}" if number else "login", Path(sys.executable).parent
        values = {"hosts": self.hosts, "folder": folder, "python": python, "command": command}
        script = MACHINE.format(name=name, number=(number or 0) - 1, **values)
        words = ["nsenter", "--net", "--mount", "-t", child(self.cluster.outer.pid)]
        words += ["ip", "netns", "exec", name] if number else []
        return Job([*words, "unshare", "--uts", "--mount", "bash", "-c", script], folder)

    def on_both(self, command, folder, code=0, meanwhile=lambda one, two: None):
        """Run a command on two machines, as `srun` does, until both end with this exit code."""
        with self.terminal(1, command, folder) as one, self.terminal(2, command, folder) as two:
            meanwhile(one, two)
            for job in (one, two):
                assert job.wait().wait_until_gone().returncode == code, job
        return one, two


@pytest.fixture
def machines(request, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    return Machines(request.getfixturevalue("cluster"), tmp_path_factory.mktemp("machines"))
