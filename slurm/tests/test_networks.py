"""Step 4 on machines with several networks, without Slurm, and with strangers on the network."""

import contextlib
import os
import re
import shutil

import pytest
import torch.distributed as dist
from machines import DEAD, LIVE
from support.results import epochs, same_bits
from support.scripts import LONG, ROOT, SCRIPT, SMALL, edited

SLOW = pytest.mark.slow
pytestmark = pytest.mark.xdist_group("machines")
GUIDE = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## )", GUIDE, re.MULTILINE | re.DOTALL)[1]


# ---------------------------------------------------------------- two machines, two terminals


@pytest.mark.weekly("one more way to start two nodes, as slurm/tests/test_nodes.py does often")
def test_two_terminals(machines, tmp_path, trained):
    """Run the guide's commands in a folder on each machine; with a copied file, they resume."""
    commands = r"^node(\d)\$ (torchrun .*\\\n.*)$"
    typed = re.findall(commands, section("Without Slurm"), re.MULTILINE)
    folders = [tmp_path / number for number, _ in typed]
    for folder in folders:
        folder.mkdir()
        shutil.copy(SCRIPT["04"], folder)
    for args, expected in ((("2", *SMALL), [1, 2]), (LONG, [3, 4])):
        with contextlib.ExitStack() as stack:
            one, two = (
                stack.enter_context(machines.terminal(n, f"{words} {' '.join(args)}", folder))
                for (n, words), folder in zip(typed, folders)
            )
            for job in (one, two):
                assert job.wait().returncode == 0, job
        assert (epochs(one), two.stdout) == (expected, "")
        shutil.copy(folders[0] / "checkpoint.pt", folders[1])
    assert same_bits(one, trained("03", *LONG))


# ---------------------------------------------------------------- several networks


@pytest.fixture
def command(machines, tmp_path):
    """The guide's command for nodes with a second name, in a network that connects them."""
    machines.names({"node{}": DEAD, "node{}i": LIVE})
    edited(tmp_path, "04", ("minutes=5", "seconds=int(os.environ['LIMIT'])"))
    block = r"^(export .*)\nsrun bash -c '(torchrun (?:.*\n)+?.*)'$"
    settings, launch = re.search(block, section("Networks"), re.MULTILINE).groups()
    return f"{settings.replace('ib0', 'eth0')}\n{launch} 1 {' '.join(SMALL)}"


@SLOW
def test_names_of_another_network(machines, command, tmp_path):
    one, _ = machines.on_both(command, tmp_path, LIMIT="60")
    assert epochs(one) == [1]


@pytest.mark.weekly("waits for gloo's timeouts; the preflight's tests find the interface")
def test_the_wrong_interface(machines, command, tmp_path):
    command = command.replace("GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth1")
    command = command.replace("--rdzv-conf=", "--rdzv-conf=read_timeout=3,")
    one, two = machines.on_both(command, tmp_path, code=1, LIMIT="3")
    error = "RuntimeError: Gloo connectFullMesh failed with .+"
    assert re.search(rf"^{error}No route to host, remote=\[{DEAD}.1\]", two.stderr, re.M), two
    assert re.search(rf"^{error} Connect timeout", one.stderr, re.M), one


@SLOW
def test_no_names_for_the_addresses(machines, tmp_path):
    machines.names({})
    store = f"dist.TCPStore('{LIVE}.1', 29400, 2, is_master=$SLURM_NODEID == 0)"
    command = f'python -c "import torch.distributed as dist; {store}"'
    for job in machines.on_both(command, tmp_path):
        assert "The hostname of the client socket cannot be retrieved. err=-3" in job.stderr


def test_no_such_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with pytest.raises(RuntimeError, match=r"Unable to find address for: ib0"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


# ---------------------------------------------------------------- strangers

JUNK = """\
import os, socket, sys, time
links = []
for place in sys.argv[1:]:
    host, port = place.split(":")
    for junk in (b"", bytes(1000), b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(2**20)):
        links.append(socket.create_connection((host, int(port)), 10))  # and it stays open
        links[-1].setblocking(False)
        if junk:
            links[-1].send(junk)
from torch.distributed import TCPStore
store = TCPStore("node1", 29400, is_master=False)
store.set("from a stranger", "anything")
print(store.get("from a stranger").decode())
print(store.get("torch.rendezvous.none.0/MASTER_ADDR").decode(), flush=True)
time.sleep(600)
"""
GATE = """\
        while self.epochs_run == 1 and not os.path.exists("go"):
            time.sleep(0.01)
        self.model.train()
"""


@pytest.mark.weekly("a run beside a stranger; it shows that nothing happens")
def test_a_stranger_connects(machines, tmp_path, trained):
    """Random bytes on each port are harmless; the keys of the rendezvous can be set and read."""
    short = ("minutes=5", "seconds=20")
    path = edited(tmp_path, "04", short, ("        self.model.train()\n", GATE))
    (tmp_path / "junk.py").write_text(JUNK, encoding="utf-8")
    train = "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"
    train += f" --rdzv-endpoint=node1:29400 {path.name} {' '.join(LONG)}"
    with (
        machines.terminal(1, train, tmp_path) as one,
        machines.terminal(2, train, tmp_path) as two,
    ):
        one.wait_for("^epoch 1 ")
        places = {n: machines.listening(n) for n in (1, 2)}
        assert {"*", f"{LIVE}.1"} == set(places[1].values())  # stores; gloo has its own
        assert {f"{LIVE}.2"} == set(places[2].values())
        everywhere = " ".join(f"node{n}:{port}" for n in places for port in places[n])
        with machines.terminal(3, f"python junk.py {everywhere}", tmp_path) as stranger:
            stranger.wait_for("^anything\nnode1$")
            (tmp_path / "go").touch()
            for job in (one, two):
                assert job.wait(120).returncode == 0, job
                job.wait_until_gone()
    assert same_bits(one, trained("03", *LONG))


class Order:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_gather_object_runs_what_it_receives(process_group, tmp_path):
    dist.gather_object(Order(str(tmp_path / "made")), [None])
    assert (tmp_path / "made").is_dir()
