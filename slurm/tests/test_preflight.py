"""What the preflight reports about healthy and broken nodes, on a real Slurm cluster."""

import contextlib
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import preflight
import psutil
import pytest
import torch
import torch.distributed as dist
from practice.cluster import NETWORK, Cluster, missing
from support.jobs import printed
from support.scripts import ROOT

FOLDER = ROOT / "slurm"
HEALTHY = "preflight: this allocation can train"


# ---------------------------------------------------------------- on a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as running:
        # Slurm must not end a job without a cable before the preflight does.
        settings = running.folder / "slurm.conf"
        text, count = re.subn("SlurmdTimeout=.*", "SlurmdTimeout=100", printed(settings))
        assert count == 1
        settings.write_text(text, encoding="utf-8")
        running.run("scontrol", "reconfigure")
        yield running


@pytest.fixture
def repository(tmp_path):
    """A copy of the files that a preflight needs, with a virtual environment."""
    copy = tmp_path / "repository"
    shutil.copytree(FOLDER, copy / "slurm", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".venv" / "bin").mkdir(parents=True)
    activate = f'export PATH="{os.path.dirname(sys.executable)}:$PATH"\n'
    (copy / ".venv" / "bin" / "activate").write_text(activate, encoding="utf-8")
    return copy


class Flight:
    """A preflight job."""

    def __init__(self, cluster, repository, *options, seconds=16):
        self.cluster, self.folder = cluster, repository
        batch = "slurm/preflight.sbatch"
        words = ["--gpus-per-node=1", *options, batch, f"--timeout={seconds}"]
        self.job = cluster.sbatch(*words, cwd=self.folder)

    @property
    def output(self):
        path = self.folder / f"preflight_{self.job}.out"
        return printed(path) if path.exists() else ""

    def wait_for(self, there, timeout=60):
        end = time.monotonic() + timeout
        while not there():
            assert time.monotonic() < end, self.output
            time.sleep(0.02)

    def ends(self, state):
        """Wait until the job has ended in this state; return the verdict: {node: reason}."""
        assert self.cluster.wait(self.job) == state, self.output
        return self.verdict

    @property
    def verdict(self):
        return dict(re.findall(r"^preflight: (\w+): (.+)$", self.output, re.MULTILINE))


@contextlib.contextmanager
def broken(cluster, node, do, undo):
    """Break a node with the command `do`, and repair it with `undo`."""
    cluster.run(*do.split(), node=node)
    try:
        yield
    finally:
        cluster.run(*undo.split(), node=node)


def row(flight, node):
    """Return the cells of a node's row in the first table."""
    return re.split(r" {2,}", re.search(rf"^{node} .*$", flight.output, re.MULTILINE)[0])


def good_row(number):
    """Return the cells of a healthy node."""
    return [f"node{number}", "ok", f"eth0 {NETWORK}.{number}", "ok", "no GPU", "ok", "ok"]


def shape(text):
    """Return the lines of a text with # for each number and single spaces."""
    return [" ".join(re.sub(r"\d+(\.\d+)?", "#", line).split()) for line in text.splitlines()]


def shown(number):
    """Return the shape of one of the two outputs that the guide shows."""
    guide = (FOLDER / "README.md").read_text(encoding="utf-8")
    return shape(re.findall(r"^```\n(node .*?)```$", guide, re.MULTILINE | re.DOTALL)[number])


def test_healthy(cluster, repository):
    before = set(repository.iterdir())
    flight = Flight(cluster, repository, "--gpus-per-node=2", seconds=60)
    assert flight.ends("COMPLETED") == {}
    lines = flight.output.splitlines()
    assert lines[0].split() == ["node", "names", "network", "port", "GPU", "clock", "folder"]
    assert row(flight, "node1") == good_row(1)
    assert row(flight, "node2") == good_row(2)
    assert "all_reduce over world size 4, gloo; GB/s is the bus bandwidth" in lines
    milliseconds, bandwidth = map(float, row(flight, "16384")[1:])
    assert bandwidth == pytest.approx(1.5 * 2**24 / milliseconds / 1e6, abs=0.001)
    assert lines[-1] == HEALTHY
    assert shape(flight.output) == shown(0)
    (new,) = set(repository.iterdir()) - before
    assert new.name == f"preflight_{flight.job}.out"


@pytest.mark.weekly
@pytest.mark.parametrize("shape", [(1, 0), (1, 3), (2, 0)], ids=str)
def test_other_allocations(cluster, repository, shape):
    nodes, gpus = shape
    options = f"--nodes={nodes}", f"--gpus-per-node={gpus}"
    flight = Flight(cluster, repository, *options, seconds=60)
    assert flight.ends("COMPLETED") == {}
    assert f"all_reduce over world size {nodes * max(1, gpus)}, gloo; " in flight.output
    assert flight.output.endswith(HEALTHY + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "reasons"),
    [
        ("{0}.2 node2\n", r"names: no address for node1; port: node1:\d+: .+"),
        (
            "{0}.1 node1\n127.0.1.1 node2\n",
            "names: node2 is 127.0.1.1, a loopback address; network: 127.0.1.1 is a loopback .+",
        ),
        (  # gloo cannot use another host's address, so it uses that of lo
            "{0}.1 node1\n{0}.1 node2\n",
            rf"names: node2 is {NETWORK}.1, but that is node1; network: lo 127.0.0.1 is a .+",
        ),
    ],
    ids=["missing", "loopback", "wrong"],
)
def test_name(cluster, repository, tmp_path, hosts, reasons):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + hosts.format(NETWORK))
    do = f"mount --bind {tmp_path}/hosts /etc/hosts"
    with broken(cluster, 2, do, "umount /etc/hosts"):
        flight = Flight(cluster, repository)
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node2"}, flight.output
    assert re.fullmatch(reasons, verdict["node2"])
    assert f"node2: task 1: {verdict['node2'].split(';')[0]}\n" in flight.output
    assert row(flight, "node1") == good_row(1)
    assert "all_reduce" not in flight.output


@pytest.mark.slow
def test_debians_hosts_file(cluster, repository, tmp_path):
    """It maps a host's own name to 127.0.1.1, so all_reduce fails with gloo."""
    with contextlib.ExitStack() as stack:
        for node, other in ((1, 2), (2, 1)):
            lines = f"127.0.0.1 localhost\n127.0.1.1 node{node}\n{NETWORK}.{other} node{other}\n"
            (tmp_path / f"hosts{node}").write_text(lines)
            do = f"mount --bind {tmp_path}/hosts{node} /etc/hosts"
            stack.enter_context(broken(cluster, node, do, "umount /etc/hosts"))
        flight = Flight(cluster, repository)
        verdict = flight.ends("FAILED")
    reason = "names: {} is 127.0.1.1, a loopback address"
    assert verdict.keys() == {"node1", "node2"}, flight.output
    for node, reasons in verdict.items():
        assert reasons.split("; ")[0] == reason.format(node)


SECOND_NETWORK = """\
ip link add eth1 type veth peer name nowhere
ip address add 10.99.0.{}/24 dev eth1
ip link set eth1 up
ip link set nowhere up"""


@pytest.fixture
def dead_network(cluster):
    """A second interface on two nodes that is up, but whose cable leads nowhere."""
    for node in (1, 2):
        cluster.run("bash", "-ec", SECOND_NETWORK.format(node), node=node)
    yield
    for node in (1, 2):
        cluster.run("ip", "link", "delete", "eth1", node=node)


@pytest.mark.slow
@pytest.mark.usefixtures("dead_network")
def test_the_wrong_network(cluster, repository):
    """The right one of two is found without help."""
    wrong = Flight(cluster, repository, "--export=ALL,GLOO_SOCKET_IFNAME=eth1")
    verdict = wrong.ends("FAILED")
    reason = "eth1 10.99.0.2 cannot reach 10.99.0.1"
    assert verdict == {"node2": f"network: {reason}"}, wrong.output
    assert row(wrong, "node1")[2] == "eth1 10.99.0.1"
    assert row(wrong, "node2")[2] == reason
    assert "all_reduce" not in wrong.output
    right = Flight(cluster, repository, seconds=60)
    assert right.ends("COMPLETED") == {}
    assert row(right, "node2") == good_row(2)


@pytest.mark.slow
@pytest.mark.parametrize("node", [1, 2])
def test_port_blocked(cluster, repository, node):
    """A firewall blocks incoming connections to the first node, or outgoing ones of another."""
    rule = "rule {} ipproto tcp dport 20000-29999 prohibit"
    if node == 1:  # it answers only to itself
        rule = f"rule {{}} from {NETWORK}.1 ipproto tcp sport 20000-29999 iif lo prohibit"
    with broken(cluster, node, f"ip {rule.format('add')}", f"ip {rule.format('delete')}"):
        flight = Flight(cluster, repository, "--nodes=3")
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {f"node{node}"}, flight.output
    assert verdict[f"node{node}"].startswith("port: ")


@pytest.mark.slow
def test_port_taken(cluster, repository):
    """A program on the first node already listens on the port of the job."""
    flight = Flight(cluster, repository, "--hold")
    port = 20000 + flight.job % 10000
    listener = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(60)"
    start = f'{sys.executable} -c "{listener}" > /dev/null 2>&1 & echo $!'
    with broken(cluster, 1, "true", f"kill {cluster.run('bash', '-c', start, node=1)}"):
        cluster.run("scontrol", "release", flight.job)
        verdict = flight.ends("FAILED")
    reason = f"port: cannot listen at {port}: Address already in use"
    assert verdict == {"node1": reason}, flight.output
    assert f"node2: task 1: port: node1:{port} does not answer\n" in flight.output


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["checks", "all_reduce"])
def test_cable_pulled(cluster, repository, moment):
    flight = Flight(cluster, repository)
    if moment == "checks":
        flight.wait_for(lambda: list(flight.folder.glob(".preflight-*/node2")))
    else:
        flight.wait_for(lambda: "\n\n" in flight.output)
    cluster.cable(2, "down")
    try:
        flight.wait_for(lambda: flight.verdict)
    finally:
        cluster.cable(2, "up")
        cluster.wait_until_idle()
    verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node2"}, flight.output
    expected = ["did not report"] if moment == "all_reduce" else ["did not report", "port: "]
    assert any(words in verdict["node2"] for words in expected)


@pytest.mark.slow
def test_folder_not_shared(cluster, repository):
    """The second node has its own copy."""
    copy = shutil.copytree(repository, repository.parent / "copy")
    with broken(cluster, 2, f"mount --bind {copy} {repository}", f"umount {repository}"):
        flight = Flight(cluster, repository)
        verdict = flight.ends("FAILED")
    assert verdict == {"node2": "folder: not shared with node1"}, flight.output
    assert row(flight, "node2") == [*good_row(2)[:-1], "not shared with node1"]
    assert set(shown(1)) <= set(shape(flight.output))


@pytest.mark.slow
def test_no_repository(cluster, repository):
    """The task cannot start on one node."""
    do = f"mount -t tmpfs none {repository}"
    with broken(cluster, 2, do, f"umount {repository}"):
        flight = Flight(cluster, repository)
        verdict = flight.ends("FAILED")
    assert verdict == {"node2": "did not report"}, flight.output


@pytest.mark.slow
def test_slow_node(cluster, repository):
    do = "tc qdisc add dev eth0 root tbf rate 200mbit burst 100kb latency 50ms"
    with broken(cluster, 3, do, "tc qdisc delete dev eth0 root"):
        flight = Flight(cluster, repository, "--nodes=3", seconds=30)
        verdict = flight.ends("FAILED")
    assert verdict.keys() == {"node3"}, flight.output
    assert verdict["node3"].startswith("slow: 0.0")


# ---------------------------------------------------------------- without one


def test_batch_file():
    path = FOLDER / "preflight.sbatch"
    text = path.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", path], check=True)
    options = re.findall(r"^##?SBATCH --[a-z-]+(?:=\S+)?$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH")  # a misspelt one would be a mere comment
    assert re.search(r'^srun (.*\\\n)+.*"\$@"\n\Z', text, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--timeout=1", "start it with: sbatch slurm/preflight.sbatch"),
        ("--timeout=0", "--timeout must be positive, not 0"),
        ("--timeout=nan", "--timeout must be positive, not nan"),
    ],
)
def test_bad_start(option, message):
    command = [sys.executable, FOLDER / "preflight.py", "20000", "node1", option]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"preflight.py: error: {message}"


def test_bus_bandwidth():
    """As nccl-tests defines it: 2 (n - 1) / n of the plain bandwidth."""
    assert preflight.bus_bandwidth(10**9, 1, 2) == 1
    assert preflight.bus_bandwidth(10**9, 2, 8) == pytest.approx(0.875)
    assert preflight.bus_bandwidth(10**9, 1, 1) == 0


def test_all_reduce_times(process_group):
    times = preflight.all_reduce_times([2**10, 2**24])
    assert len(times) == 2
    assert min(times) > 0


@pytest.mark.parametrize("count", range(1, 12))
def test_partners(count):
    """Partners agree on each turn; of up to 8 nodes, each meets every other one once."""
    nodes = [f"node{number}" for number in range(count)]
    met = {node: preflight.partners(node, nodes, 7) for node in nodes}
    for node, others in met.items():
        assert node not in others
        assert len(set(others)) == len(others)
        assert all(node in met[other] for other in others)
        if count <= 8:
            assert set(others) == set(nodes) - {node}
    while any(met.values()):  # each waits for its next partner, as in new_group, without deadlock
        pairs = [n for n in nodes if met[n] and met[met[n][0]][0] == n]
        assert pairs
        for node in pairs:
            met[node].pop(0)


def speeds(slow=(), count=4, usual=10.0):
    """Return what pairs of nodes measure; a pair with a slow node reaches a fifth."""
    nodes = [f"node{number}" for number in range(1, count + 1)]
    return {
        a: {b: usual / 5 if {a, b} & set(slow) else usual for b in nodes if b != a} for a in nodes
    }


def test_slow_nodes():
    assert preflight.slow_nodes(speeds()) == {}
    assert preflight.slow_nodes(speeds(["node1", "node2"], count=2)) == {}  # nothing to compare
    assert preflight.slow_nodes({"node1": {}}) == {}
    reason = "slow: 2.000 GB/s in its fastest pair, the median node 10.000"
    for count in range(3, 7):
        assert preflight.slow_nodes(speeds(["node3"], count)) == {"node3": [reason]}
    one_bad_pair = speeds()
    one_bad_pair["node1"]["node2"] = one_bad_pair["node2"]["node1"] = 1
    assert preflight.slow_nodes(one_bad_pair) == {}


@pytest.mark.parametrize(
    ("offsets", "bad"),
    [
        ([0, 0.9], {}),
        ([0, -0.9, 0.9], {}),
        ([0, 1.1], {"node2": "1.1 s ahead"}),
        ([0, -3600], {"node2": "3600.0 s behind"}),
        ([0, 0.1, -5, 0], {"node3": "5.0 s behind"}),
        ([0, 5, 5.2], {"node1": "5.0 s behind"}),  # all others agree, so the first is off
    ],
)
def test_clocks(offsets, bad):
    cells = preflight.clock_cells({f"node{n}": offset for n, offset in enumerate(offsets, 1)})
    assert {node: cell for node, cell in cells.items() if cell != "ok"} == bad
    assert len(cells) == len(offsets)


@pytest.mark.parametrize("ahead", [0, 5, -7])
def test_ask_clock(monkeypatch, ahead):
    """Answers that took long on the network do not count."""
    here, there = socket.socketpair()
    clock = [1000.0]
    monkeypatch.setattr(preflight, "time", SimpleNamespace(time=lambda: clock[0]))

    def answer():
        for delay, _ in zip((0.3, 0, 0.2, 0, 0), there.makefile("r"), strict=False):
            clock[0] += delay
            now = clock[0] - ahead
            clock[0] += delay / 3
            there.sendall(f"{now}\n".encode())

    thread = threading.Thread(target=answer)
    thread.start()
    with here, there:
        assert preflight.ask_clock(here, here.makefile("r")) == pytest.approx(ahead)
        thread.join()


def test_stranger_at_the_port():
    here, there = socket.socketpair()
    there.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with here, there, pytest.raises(ValueError, match="HTTP"):
        preflight.ask_clock(here, here.makefile("r"))


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
    expected = {"one": "ok", "two": "not finished after 1 s", "three": "'key'"}
    assert cells == {**expected, "four": "No such file or directory"}


def test_gloo_address(monkeypatch):
    """It is the address that gloo listens on, for each interface of this machine."""

    def listening():
        connections = psutil.Process().net_connections("tcp")
        return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}

    found = psutil.net_if_addrs().items()
    names = [name for name, own in found if any(each.family == socket.AF_INET for each in own)]
    assert "lo" in names
    for name in (None, *names):
        if name:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        before = listening()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ((address, _),) = listening() - before
        dist.destroy_process_group()
        interface, expected = preflight.gloo_address()
        assert (interface, expected) == (name or interface, address)


def test_no_such_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with pytest.raises(preflight.Fault, match=r"no address for GLOO_SOCKET_IFNAME=ib0"):
        preflight.gloo_address()


def test_an_address_without_a_name(monkeypatch):
    """A cluster without reverse DNS lookup passes."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])

    def nameless(address):
        raise socket.herror(1, "Unknown host")

    monkeypatch.setattr(socket, "gethostbyaddr", nameless)
    assert preflight.check_names(["node1"]) == "ok"
    monkeypatch.setattr(socket, "gethostbyaddr", lambda _: ("node2.site", [], ["10.0.0.1"]))
    with pytest.raises(preflight.Fault, match=r"node1 is 10.0.0.1, but that is node2.site"):
        preflight.check_names(["node1", "node2"])


def reports(count=3, tasks=2, **changes):
    """Return the reports of healthy nodes' tasks, with the cells in `changes` replaced."""
    found = []
    for rank in range(count * tasks):
        node, first = f"node{rank // tasks + 1}", rank % tasks == 0
        cells = {"port": "ok", "GPU": "ok", **({"names": "ok", "folder": "ok"} if first else {})}
        cells |= changes.get(node, {})
        found.append({"rank": rank, "node": node, "cells": cells, "offset": 0.0})
    return found


def faults(found, count=3, tasks=2):
    nodes = [f"node{number}" for number in range(1, count + 1)]
    return preflight.node_faults(preflight.node_rows(found, nodes, count * tasks), "node1")


def test_verdict():
    assert faults(reports()) == {}
    assert faults(reports(node2={"GPU": "GPU 1: out of memory"})) == {
        "node2": ["GPU: GPU 1: out of memory"]
    }
    assert faults(reports(node3={"GPU": "no GPU"})) == {"node3": ["GPU: none, others have"]}
    everywhere = {f"node{number}": {"GPU": "no GPU"} for number in (1, 2, 3)}
    assert faults(reports(**everywhere)) == {}
    assert faults(reports()[:4]) == {"node3": ["did not report"]}
    assert faults(reports()[:5]) == {"node3": ["1 of 2 tasks did not report"]}
    assert len(faults([])) == 3


@pytest.mark.parametrize("column", ["network", "port", "folder"])
def test_what_all_others_miss_is_the_fault_of_the_first(column):
    bad = {column: "refused"}
    assert faults(reports(node2=bad)) == {"node2": [f"{column}: refused"]}
    blamed = faults(reports(node2=bad, node3=bad))
    assert blamed == {"node1": [f"{column}: out of reach of all other nodes"]}
    assert faults(reports(node1=bad, node2=bad)) == {"node1": [f"{column}: refused"]}
    assert faults(reports(count=2, node2=bad), count=2) == {"node2": [f"{column}: refused"]}


def test_one_task_fails_to_measure():
    """Its fault is reported even though another task on its node has measured."""
    collector = preflight.Collector.__new__(preflight.Collector)
    collector.task = SimpleNamespace(seconds=1, tasks=2)
    collector.nodes, collector.links, collector.inbox = ["localhost"], [], queue.SimpleQueue()
    for rank, result in enumerate(["NCCL error", {"backend": "nccl", "times": [], "pairs": {}}]):
        collector.inbox.put((rank, {"rank": rank, "node": "localhost", "all_reduce": result}))
    known = [{"rank": rank, "node": "localhost"} for rank in range(2)]
    assert collector.measure(known) == {"localhost": ["all_reduce: NCCL error"]}
