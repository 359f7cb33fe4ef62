"""What the preflight reports about healthy and broken nodes, on a real Slurm cluster."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import preflight
import psutil
import pytest
import torch
import torch.distributed as dist
from clusters import Submitted
from practice.cluster import NETWORK, Cluster, missing
from support.jobs import environment
from support.results import shape
from support.scripts import ROOT, edit

SLOW = pytest.mark.slow
FOLDER = ROOT / "slurm"
GUIDE = (FOLDER / "README.md").read_text(encoding="utf-8")
HEALTHY = "preflight: this allocation can train"

pytestmark = pytest.mark.xdist_group("preflight")  # its tests mostly wait


# ---------------------------------------------------------------- on a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder, nodes=9, environment=environment()) as running:
        # Slurm must not end a job without a cable before the preflight does.
        edit(folder / "slurm.conf", "SlurmdTimeout=15", "SlurmdTimeout=100")
        running.run("scontrol", "reconfigure")
        yield running


class Flight(Submitted):
    """A preflight job."""

    def ends(self, state):
        """Wait until the job has ended in this state; return the verdict: {node: reason}."""
        assert self.wait() == state, self.output
        assert not list(self.folder.glob(".preflight-*"))
        return self.verdict

    @property
    def verdict(self):
        return dict(re.findall(r"^preflight: (\w+): (.+)$", self.output, re.MULTILINE))

    def row(self, node):
        """Return the cells of a node's row in the first table."""
        return re.split(r" {2,}", re.search(rf"^{node} .*$", self.output, re.MULTILINE)[0])


@pytest.fixture
def fly(cluster, clone):
    """Return a function that submits the preflight."""

    def fly(*options, seconds=16):
        file = "slurm/preflight.sbatch"
        return Flight(cluster, clone, "--gpus-per-node=1", *options, file, f"--timeout={seconds}")

    return fly


@contextlib.contextmanager
def broken(cluster, node, do, undo):
    """Break a node with the command `do`, and repair it with `undo`."""
    cluster.run("bash", "-ec", do, node=node)
    try:
        yield
    finally:
        cluster.run("bash", "-c", undo, node=node)


def good_row(number, tasks=1):
    """Return the cells of a healthy node."""
    address = f"{NETWORK}.{number}"
    return [f"node{number}", f"{tasks} of {tasks} reported", "ok", address, "ok", "ok", "no GPU"]


def shown(number):
    """Return the shape of one of the two outputs that the guide shows."""
    return shape(re.findall(r"^```\n(node .*?)```$", GUIDE, re.MULTILINE | re.DOTALL)[number])


def test_healthy(clone, fly):
    before = set(clone.iterdir())
    flight = fly("--gpus-per-node=2", seconds=60)
    assert flight.ends("COMPLETED") == {}
    for number in (1, 2):
        assert flight.row(f"node{number}") == good_row(number, tasks=2)
    speed = r"^all_reduce, 16 MiB, 4 ranks: (.+) s, bus bandwidth (.+) GB/s$"
    seconds, bandwidth = map(float, re.search(speed, flight.output, re.MULTILINE).groups())
    assert bandwidth == pytest.approx(1.5 * 2**24 / seconds / 1e9, rel=0.01)
    assert flight.output.splitlines()[-1] == HEALTHY
    assert shape(flight.output) == shown(0)
    (new,) = set(clone.iterdir()) - before
    assert new.name == f"preflight_{flight.number}.out"


@pytest.mark.weekly("three more sizes of an allocation; the tests above have two")
@pytest.mark.parametrize("size", [(1, 0), (1, 3), (5, 0)], ids=str)
def test_other_allocations(fly, size):
    nodes, gpus = size
    flight = fly(f"--nodes={nodes}", f"--gpus-per-node={gpus}", seconds=60)
    assert flight.ends("COMPLETED") == {}
    assert f"all_reduce, 16 MiB, {nodes * max(1, gpus)} ranks: " in flight.output


def bound(source, target):
    """Return commands that put a file or folder in the place of another, and that undo it."""
    return f"mount --bind {source} {target}", f"umount {target}"


def hosts(folder, **lines):
    """Return commands that change some lines of a node's hosts file, and that restore it."""
    names = {f"node{n}": f"{NETWORK}.{n}" for n in range(1, 10)} | lines
    text = "".join(f"{there} {name}\n" for name, there in names.items() if there)
    path = folder / f"hosts-{'-'.join(lines)}"
    path.write_text(f"127.0.0.1 localhost\n{text}", encoding="utf-8")
    return bound(path, "/etc/hosts")


SECOND_NETWORK = """\
ip link add eth1 type veth peer name nowhere
ip address add 10.99.0.{}/24 dev eth1
ip link set eth1 up
ip link set nowhere up"""


@SLOW
def test_each_node_has_a_fault_of_its_own(cluster, clone, fly):
    """But for the first, and for the second, which finds the right one of two networks."""
    for name in ("copy", "files"):
        shutil.copytree(clone / "slurm", clone.parent / name / "slurm")
    late = clone.parent / "files" / "slurm" / "preflight.py"
    text = late.read_text(encoding="utf-8")
    late.write_text(text.replace("time.time()", "(time.time() - 7)"), encoding="utf-8")
    (clone.parent / "copy" / ".venv").symlink_to(clone / ".venv")
    prohibit = "ip rule {} ipproto tcp dport 20000-29999 prohibit"
    cannot = r"network: 10\.77\.0\.{} cannot reach node1:\d+, .+"
    loopback = "network: {} is a loopback address"
    faults = {  # how to break a node, how to repair it, and what is said about it
        2: (SECOND_NETWORK.format(2), "ip link delete eth1", None),
        3: (*hosts(clone, node1=None), f"names: no address for node1; {cannot.format(3)}"),
        4: (
            *hosts(clone, node4="127.0.1.1"),
            f"names: node4 is 127.0.1.1, a loopback address; {loopback.format('127.0.1.1')}",
        ),
        5: (  # gloo cannot use another host's address, so it uses that of lo
            *hosts(clone, node5=f"{NETWORK}.1"),
            f"names: node5 is {NETWORK}.1, but that is node1; {loopback.format('127.0.0.1')}",
        ),
        6: (prohibit.format("add"), prohibit.format("delete"), cannot.format(6)),
        7: (*bound(clone.parent / "copy", clone), "folder: not shared with node1"),
        8: (f"mount -t tmpfs none {clone}", f"umount {clone}", "tasks: 0 of 1 reported"),
        9: (*bound(late, clone / "slurm" / "preflight.py"), r"clock: 7\.\d s behind"),
    }
    with contextlib.ExitStack() as stack:
        for node, (do, undo, _) in faults.items():
            stack.enter_context(broken(cluster, node, do, undo))
        flight = fly("--nodes=9", seconds=30)
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {f"node{n}" for n in faults if n > 2}, flight.output
    for node, (*_, reason) in faults.items():
        if reason:
            assert re.fullmatch(reason, verdict[f"node{node}"]), flight.output
    assert flight.row("node1") == good_row(1)
    assert flight.row("node2") == good_row(2)
    assert flight.row("node7") == [*good_row(7)[:-2], "not shared with node1", "no GPU"]
    said = [line.replace("#.#", "#") for line in shown(1)]
    assert said[1] in shape(flight.output)
    assert "all_reduce" not in flight.output


@SLOW
def test_the_wrong_network(cluster, fly):
    with contextlib.ExitStack() as stack:
        for node in (1, 2):
            do = SECOND_NETWORK.format(node)
            stack.enter_context(broken(cluster, node, do, "ip link delete eth1"))
        flight = fly("--export=ALL,GLOO_SOCKET_IFNAME=eth1")
        verdict = flight.ends("FAILED")
    (shown,) = re.findall(r"^preflight: node2: (network: .*)$", GUIDE, re.MULTILINE)
    assert [re.sub(r":\d+", ":20007", verdict.pop("node2")), verdict] == [shown, {}], flight.output
    assert flight.row("node1")[3] == "10.99.0.1"


@SLOW
def test_nobody_reaches_the_first_node(cluster, fly):
    """It answers only to itself; or a program on it already listens on the port of the job."""
    rule = f"rule {{}} from {NETWORK}.1 ipproto tcp sport 20000-29999 iif lo prohibit"
    with broken(cluster, 1, f"ip {rule.format('add')}", f"ip {rule.format('delete')}"):
        flight = fly("--nodes=3")
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node1"}, flight.output
    assert re.fullmatch(r"network: all other nodes say .+ cannot reach node1.+", verdict["node1"])

    flight = fly("--hold")
    port = flight.lose_its_port()
    verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node1"}, flight.output
    assert f"port: {port}, " in verdict["node1"]
    assert "address already in use" in verdict["node1"]


def measuring(folder):
    """Return how many tasks have started to time all_reduce."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_task = "measure" in words and "python" in words[0]
            count += is_task and process.cwd() == str(folder)
    return count


@SLOW
def test_cable_pulled(cluster, fly):
    """While the ranks measure, so that the first node's cannot go on either."""
    flight = fly()
    flight.wait_for(lambda: measuring(flight.folder) == 2)
    cluster.cable(2, "down")
    try:
        flight.wait_for(lambda: flight.verdict)
    finally:
        cluster.cable(2, "up")
        cluster.wait_until_idle()
    assert flight.ends("FAILED") == {"node2": "tasks: 0 of 1 reported"}, flight.output


@SLOW
def test_slow_node(cluster, fly):
    do = "tc qdisc add dev eth0 root tbf rate 200mbit burst 100kb latency 50ms"
    with broken(cluster, 3, do, "tc qdisc delete dev eth0 root"):
        flight = fly("--nodes=3", seconds=30)
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node3"}, flight.output
    assert re.match("slow: .+ s in its fastest pair, the median node", verdict["node3"])


# ---------------------------------------------------------------- without one


def test_started_without_slurm():
    command = [sys.executable, FOLDER / "preflight.py", "srun"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("error: start it with: sbatch slurm/preflight.sbatch\n")


def test_slow_nodes():
    """A node is judged by its fastest pair, against the median node."""
    nodes = range(4)
    pairs = {a: [5.0 if 3 in (a, b) else 1.0 for b in nodes if b != a] for a in nodes}
    reason = "slow: 5 s in its fastest pair, the median node 1 s"
    assert preflight.slow_nodes(pairs) == {3: [reason]}
    pairs[3][0] = pairs[0][2] = 1.1  # the others were bad pairs
    assert preflight.slow_nodes(pairs) == preflight.slow_nodes({0: []}) == {}


def test_gpu(monkeypatch):
    """What can be tested without a GPU."""
    asked = []

    def ones(size, **options):
        if asked:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")
        asked.append(size)
        return torch.zeros(1)

    monkeypatch.setattr(torch, "ones", ones)
    cuda = {"is_available": True, "device_count": 2, "set_device": None, "mem_get_info": (10, 100)}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert preflight.check_gpu(1, 2) == "ok"
    assert asked == [80]
    with pytest.raises(RuntimeError, match=r"^GPU 1: CUDA out of memory$"):
        preflight.check_gpu(1, 2)
    with pytest.raises(RuntimeError, match=r"^2 GPUs for 4 tasks$"):
        preflight.check_gpu(1, 4)


def test_a_check_that_hangs():
    end = threading.Event()
    checks = {"one": lambda: "ok", "two": end.wait, "three": lambda: {}["key"]}
    cells = preflight.at_once({**checks, "four": lambda: os.listdir("/nowhere")}, 1)
    end.set()
    bad = {"two": "not finished after 1 s", "three": "'key'", "four": "No such file or directory"}
    assert cells == {"one": (True, "ok"), **{name: (False, text) for name, text in bad.items()}}


def test_gloo_address(monkeypatch):
    """It is the address that gloo listens on, for each interface of this machine."""

    def listening():
        connections = psutil.Process().net_connections("tcp")
        return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}

    own = psutil.net_if_addrs().items()
    names = [name for name, found in own if any(each.family == socket.AF_INET for each in found)]
    for name in ("", *names):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        if not name:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        before = listening()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ((address, _),) = listening() - before
        dist.destroy_process_group()
        assert preflight.gloo_address() == address


def test_an_address_without_a_name(monkeypatch):
    """A cluster without reverse DNS lookup passes."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))  # has no name
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    assert preflight.check_names(["node1"]) == "ok"


def faults(count=3, lost=0, **changes):
    """Return the faults of healthy nodes with two tasks each, with the cells in `changes`."""
    nodes = [f"node{number}" for number in range(1, count + 1)]
    fine = dict.fromkeys(preflight.COLUMNS, (True, "ok"))
    found = [{"node": node, "cells": fine | changes.get(node, {})} for node in nodes * 2]
    rows = preflight.node_rows(found[: len(found) - lost], nodes, 2, preflight.COLUMNS)
    return preflight.node_faults(rows, "node1")


def test_verdict():
    none = {"GPU": (True, "no GPU")}
    assert faults() == faults(node1=none, node2=none, node3=none) == {}
    assert faults(node3=none) == {"node3": ["GPU: none, others have"]}
    assert faults(lost=1) == {"node3": ["tasks: 1 of 2 reported"]}
    assert len(faults(lost=6)) == 3
    for column in ("network", "clock", "folder"):
        bad = {column: (False, "bad")}
        assert faults(node2=bad) == faults(2, node2=bad) == {"node2": [f"{column}: bad"]}
        assert faults(node1=bad, node2=bad) == {"node1": [f"{column}: bad"]}
        blamed = faults(node2=bad, node3=bad)
        assert blamed == {"node1": [f"{column}: all other nodes say bad"]}


def test_one_task_fails():
    """Its fault is reported even though another task on its node has none."""
    bad = {"cells": {"all_reduce": (False, "NCCL error")}}
    fine = {"cells": {"all_reduce": (True, [1.0])}}
    for one, two in ((bad, fine), (fine, bad)):
        reports = [{"node": "here", **one}, {"node": "here", **two}]
        rows = preflight.node_rows(reports, ["here"], 2, ("tasks", "all_reduce"))
        assert preflight.node_faults(rows, "here") == {"here": ["all_reduce: NCCL error"]}
