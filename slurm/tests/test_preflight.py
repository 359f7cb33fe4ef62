"""What the preflight reports about healthy and broken nodes, on a real Slurm cluster."""

import contextlib
import re
import shutil
import threading
from unittest.mock import Mock

import preflight
import pytest
import torch
from clusters import in_the_guide
from practice.cluster import NETWORK, Cluster, missing
from support.jobs import environment
from support.results import shape
from support.scripts import edit

SLOW = pytest.mark.slow


# ---------------------------------------------------------------- on a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder, nodes=8, environment=environment()) as running:
        yield running


@pytest.fixture
def fly(submit):
    """Return a function that submits the preflight and waits until it is in this state."""

    def fly(state, *options):
        options = ("--gpus-per-node=1", *options)
        return submit("slurm/preflight.sbatch", "--timeout=40", options=options).becomes(state)

    return fly


def blames(job, faults):
    """Check that a preflight names these nodes alone, with reasons that match {node: pattern}."""
    named = dict(re.findall(r"^preflight: (\w+): (.+)$", job.stdout, re.MULTILINE))
    assert named.keys() == faults.keys(), job.stdout
    for node, pattern in faults.items():
        assert re.fullmatch(pattern, named[node]), job.stdout


def row(job, number):
    """Return the cells of a node's row in the first table."""
    return re.split(r" {2,}", re.search(rf"^node{number} .*$", job.stdout, re.MULTILINE)[0])


def good_row(number, tasks=1):
    """Return the cells of a healthy node."""
    address = f"{NETWORK}.{number}"
    return [f"node{number}", f"{tasks} of {tasks} reported", "ok", address, "ok", "ok", "no GPU"]


@contextlib.contextmanager
def broken(cluster, faults):
    """Break nodes with commands, and repair them: {node: (command that breaks, and repairs)}."""
    with contextlib.ExitStack() as stack:
        for node, (breaks, repairs) in faults.items():
            cluster.run("bash", "-ec", breaks, node=node)
            stack.callback(cluster.run, "bash", "-c", repairs, node=node)
        yield


def second_network(number):
    """Return commands that give a node a network that reaches no other node, and that undo it."""
    do = f"""\
ip link add eth1 type veth peer name nowhere
ip address add 10.99.0.{number}/24 dev eth1
ip link set eth1 up
ip link set nowhere up"""
    return do, "ip link delete eth1"


def bound(source, target):
    """Return commands that put a file or folder in the place of another, and that undo it."""
    return f"mount --bind {source} {target}", f"umount {target}"


def test_healthy(clone, fly):
    before = set(clone.iterdir())
    flight = fly("COMPLETED", "--gpus-per-node=2")
    assert [row(flight, n) for n in (1, 2)] == [good_row(n, tasks=2) for n in (1, 2)]
    speed = r"^all_reduce, 16 MiB, 4 ranks: (.+) s, bus bandwidth (.+) GB/s$"
    seconds, bandwidth = map(float, re.search(speed, flight.stdout, re.MULTILINE).groups())
    assert bandwidth == pytest.approx(1.5 * 2**24 / seconds / 1e9, rel=0.01)
    assert shape(flight.stdout) == shape(in_the_guide(r"^```\n(node (?s:.*?))```$"))
    assert len({*clone.iterdir()} - before) == 1  # it leaves only its output


@SLOW
def test_each_node_has_a_fault_of_its_own(cluster, clone, fly, tmp_path):
    """But for the first, and for the second, which finds the right one of two networks."""
    shutil.copytree(clone, tmp_path / "copy", symlinks=True)
    late = shutil.copy(clone / "slurm" / "preflight.py", tmp_path)
    edit(tmp_path / "preflight.py", '"time": time.time()', '"time": time.time() - 7')
    names = (cluster.folder / "hosts").read_text(encoding="utf-8")
    lost, loopback = tmp_path / "lost", tmp_path / "loopback"
    lost.write_text(names.replace("node1\n", "other\n"), encoding="utf-8")
    loopback.write_text(f"127.0.1.1 node4\n{names}", encoding="utf-8")
    prohibit = "ip rule {} ipproto tcp dport 20000-29999 prohibit"
    cannot = rf"network: {NETWORK}\.{{}} cannot reach node1:\d+, .+"
    faults = {  # how to break a node and how to repair it, and what is said about it
        2: (second_network(2), None),
        3: (bound(lost, "/etc/hosts"), f"names: no address for node1; {cannot.format(3)}"),
        4: (bound(loopback, "/etc/hosts"), "network: 127.0.1.1 is a loopback address"),
        5: ((prohibit.format("add"), prohibit.format("delete")), cannot.format(5)),
        6: (
            bound(tmp_path / "copy", clone),
            in_the_guide("^preflight: node2: (folder: .*)$"),
        ),
        7: ((f"mount -t tmpfs none {clone}", f"umount {clone}"), "tasks: 0 of 1 reported"),
        8: (bound(late, clone / "slurm" / "preflight.py"), r"clock: 7\.\d s behind"),
    }
    with broken(cluster, {node: commands for node, (commands, _) in faults.items()}):
        flight = fly("FAILED", "--nodes=8")
    blames(flight, {f"node{node}": why for node, (_, why) in faults.items() if why})
    assert [row(flight, n) for n in (1, 2)] == [good_row(1), good_row(2)]
    assert "all_reduce" not in flight.stdout


@SLOW
def test_two_nodes_use_a_network_that_does_not_connect_them(cluster, fly):
    with broken(cluster, {1: second_network(1), 2: second_network(2)}):
        flight = fly("FAILED", "--export=ALL,GLOO_SOCKET_IFNAME=eth1")
    shown = in_the_guide("^preflight: node2: (network: .*)$")
    blames(flight, {"node2": shown.replace("20007", r"\d+")})


@SLOW
def test_another_program_listens_on_the_port(clone, fly):
    edit(clone / "slurm" / "preflight.py", "20000 + job % 10000", "6818")  # slurmd's
    blames(fly("FAILED"), {"node1": "network: .*port: 6818, .*already in use.*"})


@SLOW
def test_one_node_is_slow(cluster, fly):
    limit = "tc qdisc add dev eth0 root tbf rate 200mbit burst 100kb latency 50ms"
    with broken(cluster, {3: (limit, "tc qdisc delete dev eth0 root")}):
        flight = fly("FAILED", "--nodes=3")
    blames(flight, {"node3": "slow: .+ s in its fastest pair, the median node .+"})


# ---------------------------------------------------------------- without one


def test_gpu(monkeypatch):
    """What can be tested without a GPU."""
    cuda = {"is_available": True, "device_count": 2, "set_device": None, "mem_get_info": (10, 100)}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=value))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")
    monkeypatch.setattr(torch, "ones", ones := Mock(side_effect=[torch.zeros(1), full]))
    assert preflight.check_gpu(1, 2) == "ok"
    assert ones.call_args.args == (80,)
    with pytest.raises(RuntimeError, match=r"^GPU 1: CUDA out of memory$"):
        preflight.check_gpu(1, 2)
    with pytest.raises(RuntimeError, match=r"^2 GPUs for 4 tasks$"):
        preflight.check_gpu(1, 4)


def test_a_check_that_hangs():
    end = threading.Event()
    cells = preflight.at_once({"one": lambda: "ok", "two": end.wait}, 1)
    end.set()
    assert cells == {"one": (True, "ok"), "two": (False, "not finished after 1 s")}


def test_a_node_without_a_gpu_among_nodes_with_one():
    reports = [
        {"node": "node1", "cells": {"GPU": (True, "ok")}},
        {"node": "node2", "cells": {"GPU": (True, "no GPU")}},
    ]
    rows = preflight.node_rows(reports, ["node1", "node2"], 1, ("tasks", "GPU"))
    assert preflight.node_faults(rows, "node1") == {"node2": ["GPU: none, others have"]}


def test_if_no_other_node_reaches_the_first_that_one_is_to_blame():
    cells = {"node1": (True, "ok"), "node2": (False, "no route"), "node3": (False, "no route")}
    rows = {node: {"network": cell} for node, cell in cells.items()}
    expected = {"node1": ["network: all other nodes say no route"]}
    assert preflight.node_faults(rows, "node1") == expected
