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
        options = ("--gpus-per-node=1", *options)
        return Flight(cluster, clone, file, f"--timeout={seconds}", options=options)

    return fly


@contextlib.contextmanager
def broken(cluster, node, do, undo):
    """Break a node with the command `do`, and repair it with `undo`."""
    cluster.run("bash", "-ec", do, node=node)
    try:
        yield
    finally:
        cluster.run("bash", "-c", undo, node=node)


def good_row(number):
    """Return the cells of a healthy node."""
    return [f"node{number}", "ok", f"eth0 {NETWORK}.{number}", "ok", "no GPU", "ok", "ok"]


def shown(number):
    """Return the shape of one of the two outputs that the guide shows."""
    return shape(re.findall(r"^```\n(node .*?)```$", GUIDE, re.MULTILINE | re.DOTALL)[number])


def test_healthy(clone, fly):
    before = set(clone.iterdir())
    flight = fly("--gpus-per-node=2", seconds=60)
    assert flight.ends("COMPLETED") == {}
    for number in (1, 2):
        assert flight.row(f"node{number}") == good_row(number)
    milliseconds, bandwidth = map(float, flight.row("16384")[1:])
    assert bandwidth == pytest.approx(1.5 * 2**24 / milliseconds / 1e6, abs=0.001)
    assert flight.output.splitlines()[-1] == HEALTHY
    assert shape(flight.output) == shown(0)
    (new,) = set(clone.iterdir()) - before
    assert new.name == f"preflight_{flight.number}.out"


@pytest.mark.weekly("three more sizes of an allocation; the tests above have two")
@pytest.mark.parametrize("size", [(1, 0), (1, 3), (2, 0)], ids=str)
def test_other_allocations(fly, size):
    nodes, gpus = size
    flight = fly(f"--nodes={nodes}", f"--gpus-per-node={gpus}", seconds=60)
    assert flight.ends("COMPLETED") == {}
    assert f"all_reduce over world size {nodes * max(1, gpus)}, gloo; " in flight.output


def hosts(folder, lines):
    """Return commands that change some lines of a node's hosts file, and that restore it."""
    numbers = range(1, 10)
    names = {f"node{n}": f"{NETWORK}.{n}" for n in numbers} | lines
    text = "".join(f"{there} {name}\n" for name, there in names.items() if there)
    path = folder / f"hosts-{len(list(folder.glob('hosts-*')))}"
    path.write_text(f"127.0.0.1 localhost\n{text}", encoding="utf-8")
    return f"mount --bind {path} /etc/hosts", "umount /etc/hosts"


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
    second, no_eth1 = SECOND_NETWORK, "ip link delete eth1"
    port = "rule {} ipproto tcp dport 20000-29999 prohibit"
    faults = {
        2: (second.format(2), no_eth1, None),
        3: (*hosts(clone, {"node1": None}), r"names: no address for node1; port: node1:\d+: .+"),
        4: (
            *hosts(clone, {"node4": "127.0.1.1"}),
            "names: node4 is 127.0.1.1, a loopback address; network: 127.0.1.1 is a loopback .+",
        ),
        5: (  # gloo cannot use another host's address, so it uses that of lo
            *hosts(clone, {"node5": f"{NETWORK}.1"}),
            rf"names: node5 is {NETWORK}.1, but that is node1; network: lo 127.0.0.1 is a .+",
        ),
        6: (f"ip {port.format('add')}", f"ip {port.format('delete')}", r"port: node1:\d+: .+"),
        7: (
            f"mount --bind {clone.parent}/copy {clone}",
            f"umount {clone}",
            "folder: not shared with node1",
        ),
        8: (f"mount -t tmpfs none {clone}", f"umount {clone}", "did not report"),
        9: (
            f"mount --bind {late} {clone}/slurm/preflight.py",
            f"umount {clone}/slurm/preflight.py",
            "clock: 7.0 s behind",
        ),
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
    row = [*good_row(7)[:-1], "not shared with node1"]
    assert flight.row("node7") == row
    said = [line.replace("#.#", "#") for line in shown(1)]
    assert said[1] in shape(flight.output)
    assert "all_reduce" not in flight.output


@SLOW
def test_debians_hosts_file(cluster, clone, fly):
    """It maps a host's own name to 127.0.1.1, so all_reduce fails with gloo."""
    with contextlib.ExitStack() as stack:
        for node in (1, 2):
            own = hosts(clone, {f"node{node}": "127.0.1.1"})
            stack.enter_context(broken(cluster, node, *own))
        flight = fly()
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node1", "node2"}, flight.output
    for node, reasons in verdict.items():
        assert reasons.split("; ")[0] == f"names: {node} is 127.0.1.1, a loopback address"


@SLOW
def test_the_wrong_network(cluster, fly):
    with contextlib.ExitStack() as stack:
        for node in (1, 2):
            do = SECOND_NETWORK.format(node)
            stack.enter_context(broken(cluster, node, do, "ip link delete eth1"))
        flight = fly("--export=ALL,GLOO_SOCKET_IFNAME=eth1")
        verdict = flight.ends("FAILED")
    (shown,) = re.findall(r"^preflight: node2: (network: .*)$", GUIDE, re.MULTILINE)
    assert verdict == {"node2": shown}, flight.output
    assert flight.row("node1")[2] == "eth1 10.99.0.1"


@SLOW
def test_nobody_reaches_the_first_node(cluster, fly):
    """It answers only to itself; or a program on it already listens on the port of the job."""
    rule = f"rule {{}} from {NETWORK}.1 ipproto tcp sport 20000-29999 iif lo prohibit"
    with broken(cluster, 1, f"ip {rule.format('add')}", f"ip {rule.format('delete')}"):
        flight = fly("--nodes=3")
        verdict = flight.ends("FAILED")
    assert verdict == {"node1": "port: out of reach of all other nodes"}, flight.output

    flight = fly("--hold")
    port = 20000 + flight.number % 10000
    listener = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(60)"
    start = f'{sys.executable} -c "{listener}" > /dev/null 2>&1 & echo $!'
    with broken(cluster, 1, "true", f"kill {cluster.run('bash', '-c', start, node=1)}"):
        cluster.run("scontrol", "release", flight.number)
        verdict = flight.ends("FAILED")
    assert verdict == {"node1": f"port: cannot listen at {port}: Address already in use"}


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
@pytest.mark.parametrize("moment", ["checks", "all_reduce"])
def test_cable_pulled(cluster, fly, moment):
    flight = fly()
    if moment == "checks":
        flight.wait_for(lambda: list(flight.folder.glob(".preflight-*/node2")))
    else:
        flight.wait_for(lambda: measuring(flight.folder) == 2)
    cluster.cable(2, "down")
    try:
        flight.wait_for(lambda: flight.verdict)
    finally:
        cluster.cable(2, "up")
        cluster.wait_until_idle()
    assert flight.ends("FAILED").keys() == {"node2"}, flight.output
    assert "did not report" in flight.verdict["node2"]


@SLOW
def test_slow_node(cluster, fly):
    do = "tc qdisc add dev eth0 root tbf rate 200mbit burst 100kb latency 50ms"
    with broken(cluster, 3, do, "tc qdisc delete dev eth0 root"):
        flight = fly("--nodes=3", seconds=30)
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node3"}, flight.output
    assert verdict["node3"].startswith("slow: 0.0")


# ---------------------------------------------------------------- without one


def test_started_without_slurm():
    command = [sys.executable, FOLDER / "preflight.py", "srun"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("error: start it with: sbatch slurm/preflight.sbatch\n")


@pytest.mark.parametrize("count", range(1, 12))
def test_partners(count):
    """In each turn, partners agree; of up to 8 nodes, each meets every other one once."""
    nodes = [f"node{number}" for number in range(count)]
    met = {node: preflight.partners(node, nodes, 7) for node in nodes}
    for node, others in met.items():
        assert len(set(others) - {node}) == len(others)
        assert count > 8 or len(others) == count - 1
    while any(met.values()):  # each waits for its next partner, as in new_group, without deadlock
        pairs = [n for n in nodes if met[n] and met[met[n][0]][0] == n]
        assert pairs
        for node in pairs:
            met[node].pop(0)


def test_slow_nodes():
    """A node is judged by its fastest pair, against the median node."""
    nodes = [f"node{number}" for number in range(4)]
    pairs = {a: {b: 2.0 if "node3" in (a, b) else 10.0 for b in nodes if b != a} for a in nodes}
    reason = "slow: 2.000 GB/s in its fastest pair, the median node 10.000"
    assert preflight.slow_nodes(pairs) == {"node3": [reason]}
    pairs["node3"]["node0"] = pairs["node0"]["node3"] = 9.0  # the others were bad pairs
    assert preflight.slow_nodes(pairs) == preflight.slow_nodes({"node0": {}}) == {}


def test_clocks():
    """The median is right; of two clocks, the first node's."""
    for offsets, bad in (
        ([0, -0.9, 0.9], {}),
        ([0, 1.1], {"1": "1.1 s ahead"}),
        ([0, 5, 5.2], {"0": "5.0 s behind"}),
    ):
        cells = preflight.clock_cells({str(n): offset for n, offset in enumerate(offsets)})
        assert {node: text for node, (fine, text) in cells.items() if not fine} == bad


def test_stranger_at_the_port():
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            link, _ = server.accept()
            with link:
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer).start()
        with pytest.raises(preflight.Fault, match=f"^another program answers at localhost:{port}"):
            preflight.ask("localhost", port, 30)


def test_gpu(monkeypatch):
    """What can be tested without a GPU."""
    asked = []

    def ones(size, **options):
        if asked:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")
        asked.append(size)
        return torch.zeros(1)

    for name, value in {
        "is_available": True,
        "device_count": 2,
        "set_device": None,
        "mem_get_info": (10, 100),
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "ones", ones)
    assert preflight.check_gpu(1, 2) == "ok"
    assert asked == [80]
    with pytest.raises(preflight.Fault, match=r"^GPU 1: CUDA out of memory$"):
        preflight.check_gpu(1, 2)
    with pytest.raises(preflight.Fault, match=r"^2 GPUs for 4 tasks$"):
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
    for name in (None, *names):
        if name:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        before = listening()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ((address, _),) = listening() - before
        dist.destroy_process_group()
        interface, expected = preflight.gloo_address()
        assert (interface, expected) == (name or interface, address)


def test_an_address_without_a_name(monkeypatch):
    """A cluster without reverse DNS lookup passes."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))  # has no name
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    assert preflight.check_names(["node1"]) == "ok"


def faults(count=3, lost=0, **changes):
    """Return the faults of healthy nodes with two tasks each, with the cells in `changes`."""
    nodes = [f"node{number}" for number in range(1, count + 1)]
    fine = {"port": (True, 0.0), "GPU": (True, "ok"), "names": (True, "ok")}
    found = [{"node": node, "cells": fine | changes.get(node, {})} for node in nodes * 2]
    rows = preflight.node_rows(found[: len(found) - lost], nodes, 2)
    return preflight.node_faults(rows, "node1")


def test_verdict():
    none = {"GPU": (True, "no GPU")}
    assert faults() == faults(node1=none, node2=none, node3=none) == {}
    assert faults(node3=none) == {"node3": ["GPU: none, others have"]}
    assert faults(lost=1) == {"node3": ["1 of 2 tasks did not report"]}
    assert len(faults(lost=6)) == 3
    for column in ("network", "port", "folder"):
        bad = {column: (False, "refused")}
        assert faults(node2=bad) == faults(2, node2=bad) == {"node2": [f"{column}: refused"]}
        assert faults(node1=bad, node2=bad) == {"node1": [f"{column}: refused"]}
        blamed = faults(node2=bad, node3=bad)
        assert blamed == {"node1": [f"{column}: out of reach of all other nodes"]}


def test_one_task_fails_to_measure():
    """Its fault is reported even though another task on its node has measured."""
    told = {"node": "here", "cells": {"all_reduce": (False, "NCCL error")}}
    well = {"node": "here", "cells": {"all_reduce": (True, {})}}
    assert preflight.speed_faults([told, well], ["here"], 2) == {"here": ["all_reduce: NCCL error"]}
    assert preflight.speed_faults([well], ["here"], 2) == {"here": ["all_reduce: did not report"]}
