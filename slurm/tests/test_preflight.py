"""What the preflight reports about healthy and broken nodes, on a real Slurm cluster."""

import contextlib
import os
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
    with Cluster(folder, nodes=9, environment=environment()) as running:
        # Slurm must not end a job without a cable before the preflight does.
        edit(folder / "slurm.conf", "SlurmdTimeout=15", "SlurmdTimeout=100")
        running.run("scontrol", "reconfigure")
        yield running


@pytest.fixture
def fly(clone, submit):
    """Return a function that submits the preflight, which leaves only its output."""
    before = set(clone.iterdir())

    def fly(*options, seconds=16):
        options = ("--gpus-per-node=1", *options)
        return submit("slurm/preflight.sbatch", f"--timeout={seconds}", options=options)

    yield fly
    assert all(path.suffix == ".out" for path in {*clone.iterdir()} - before)


def blames(job, faults):
    """Check that a preflight names these nodes alone, with reasons that match {node: pattern}."""
    named = dict(re.findall(r"^preflight: (\w+): (.+)$", job.stdout, re.MULTILINE))
    assert named.keys() == faults.keys(), job.stdout
    for node, pattern in faults.items():
        assert re.fullmatch(pattern, named[node]), job.stdout


def row(job, number):
    """Return the cells of a node's row in the first table."""
    return re.split(r" {2,}", re.search(rf"^node{number} .*$", job.stdout, re.MULTILINE)[0])


@contextlib.contextmanager
def broken(cluster, node, do, undo):
    """Break a node with the command `do`, and repair it with `undo`."""
    cluster.run("bash", "-ec", do, node=node)
    try:
        yield
    finally:
        cluster.run("bash", "-c", undo, node=node)


def second_network(number):
    """Return commands that give a node a network that reaches no other node, and that undo it."""
    do = f"""\
ip link add eth1 type veth peer name nowhere
ip address add 10.99.0.{number}/24 dev eth1
ip link set eth1 up
ip link set nowhere up"""
    return do, "ip link delete eth1"


def good_row(number, tasks=1):
    """Return the cells of a healthy node."""
    address = f"{NETWORK}.{number}"
    return [f"node{number}", f"{tasks} of {tasks} reported", "ok", address, "ok", "ok", "no GPU"]


def test_healthy(fly):
    flight = fly("--gpus-per-node=2", seconds=60).becomes("COMPLETED")
    assert [row(flight, n) for n in (1, 2)] == [good_row(n, tasks=2) for n in (1, 2)]
    speed = r"^all_reduce, 16 MiB, 4 ranks: (.+) s, bus bandwidth (.+) GB/s$"
    seconds, bandwidth = map(float, re.search(speed, flight.stdout, re.MULTILINE).groups())
    assert bandwidth == pytest.approx(1.5 * 2**24 / seconds / 1e9, rel=0.01)
    assert shape(flight.stdout) == shape(in_the_guide(r"^```\n(node (?s:.*?))```$"))


def bound(source, target):
    """Return commands that put a file or folder in the place of another, and that undo it."""
    return f"mount --bind {source} {target}", f"umount {target}"


def hosts(folder, name, address=""):
    """Return commands that change a name's line in a node's hosts file, and that restore it."""
    names = {"localhost": "127.0.0.1"} | {f"node{n}": f"{NETWORK}.{n}" for n in range(1, 10)}
    names[name] = address or "#"
    path = folder / f"hosts-{name}"
    path.write_text("".join(f"{there} {name}\n" for name, there in names.items()), "utf-8")
    return bound(path, "/etc/hosts")


@SLOW
def test_each_node_has_a_fault_of_its_own(cluster, clone, fly, tmp_path_factory):
    """But for the first, and for the second, which finds the right one of two networks."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(clone, elsewhere / "copy", symlinks=True)
    late = shutil.copy(clone / "slurm" / "preflight.py", elsewhere)
    edit(elsewhere / "preflight.py", '"time": time.time()', '"time": time.time() - 7')
    prohibit = "ip rule {} ipproto tcp dport 20000-29999 prohibit"
    cannot = r"network: 10\.77\.0\.{} cannot reach node1:\d+, .+"
    loopback = "network: {} is a loopback address"
    own, of_1 = "127.0.1.1", f"{NETWORK}.1"
    faults = {  # how to break a node, how to repair it, and what is said about it
        2: (*second_network(2), None),
        3: (*hosts(elsewhere, "node1"), f"names: no address for node1; {cannot.format(3)}"),
        4: (
            *hosts(elsewhere, "node4", own),
            f"names: node4 is {own}, a loopback address; {loopback.format(own)}",
        ),
        5: (  # gloo cannot use another host's address, so it uses that of lo
            *hosts(elsewhere, "node5", of_1),
            f"names: node5 is {of_1}, but that is node1; {loopback.format('127.0.0.1')}",
        ),
        6: (prohibit.format("add"), prohibit.format("delete"), cannot.format(6)),
        7: (*bound(elsewhere / "copy", clone), in_the_guide("^preflight: node2: (folder: .*)$")),
        8: (f"mount -t tmpfs none {clone}", f"umount {clone}", "tasks: 0 of 1 reported"),
        9: (*bound(late, clone / "slurm" / "preflight.py"), r"clock: 7\.\d s behind"),
    }
    with contextlib.ExitStack() as stack:
        for node, (do, undo, _) in faults.items():
            stack.enter_context(broken(cluster, node, do, undo))
        flight = fly("--nodes=9", seconds=30).becomes("FAILED")
    blames(flight, {f"node{node}": why for node, (*_, why) in faults.items() if why})
    assert [row(flight, n) for n in (1, 2)] == [good_row(1), good_row(2)]
    assert row(flight, 7) == [*good_row(7)[:-2], "not shared with node1", "no GPU"]
    assert "all_reduce" not in flight.stdout


RULE = f"ip rule {{}} from {NETWORK}.1 ipproto tcp sport 20000-29999 iif lo prohibit"
SLOW_LINK = "tc qdisc add dev eth0 root tbf rate 200mbit burst 100kb latency 50ms"
FLIGHTS = {  # commands that break nodes and repair them, options, what is said about a node
    "two nodes use a network that connects none": (
        {1: second_network(1), 2: second_network(2)},
        ["--export=ALL,GLOO_SOCKET_IFNAME=eth1"],
        {"node2": in_the_guide("^preflight: node2: (network: .*)$").replace("20007", r"\d+")},
    ),
    "the first node answers only to itself": (
        {1: (RULE.format("add"), RULE.format("delete"))},
        ["--nodes=3"],
        {"node1": "network: all other nodes say .+ cannot reach node1.+"},
    ),
    "one node is slow": (
        {3: (SLOW_LINK, "tc qdisc delete dev eth0 root")},
        ["--nodes=3"],
        {"node3": "slow: .+ s in its fastest pair, the median node .+"},
    ),
}


@SLOW
@pytest.mark.parametrize("what", FLIGHTS)
def test_one_fault(cluster, fly, what):
    breaks, options, faults = FLIGHTS[what]
    with contextlib.ExitStack() as stack:
        for node, commands in breaks.items():
            stack.enter_context(broken(cluster, node, *commands))
        blames(fly(*options, seconds=30).becomes("FAILED"), faults)


@SLOW
def test_another_program_listens_on_the_port(fly):
    flight = fly("--hold")
    port = flight.lose_its_port()
    blames(flight.becomes("FAILED"), {"node1": f"network: .*port: {port}, .*already in use.*"})


@SLOW
def test_a_cable_is_pulled(cluster, fly):
    """While the ranks measure, so that the first node's cannot go on either."""
    flight = fly(seconds=20)  # a busy machine may take that long to import PyTorch
    measures = "pgrep -f '[p]reflight.py measure' || true"
    flight.wait_for(lambda: cluster.run("bash", "-c", measures, node=2))
    with broken(cluster, None, "ip link set cable2 down", "ip link set cable2 up"):
        flight.wait_for(lambda: "\npreflight: " in flight.stdout)
    cluster.wait_until_idle()
    blames(flight.becomes("FAILED"), {"node2": "tasks: 0 of 1 reported"})


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
    checks = {"one": lambda: "ok", "two": end.wait, "three": lambda: {}["key"]}
    cells = preflight.at_once({**checks, "four": lambda: os.listdir("/nowhere")}, 1)
    end.set()
    bad = {"two": "not finished after 1 s", "three": "'key'", "four": "No such file or directory"}
    assert cells == {"one": (True, "ok"), **{name: (False, text) for name, text in bad.items()}}


def test_a_node_without_a_gpu_among_nodes_with_one():
    def report(node, gpu):
        return {"node": node, "cells": {"GPU": (True, gpu)}}

    reports = [report("node1", "ok"), report("node2", "no GPU")]
    rows = preflight.node_rows(reports, ["node1", "node2"], 1, ("tasks", "GPU"))
    assert preflight.node_faults(rows, "node1") == {"node2": ["GPU: none, others have"]}
