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
def launch(machines, tmp_path):
    """Return a function that runs the guide's command on both nodes, as `srun` does."""
    machines.names({"node{}": DEAD, "node{}i": LIVE})
    path = edited(tmp_path, "04", ("minutes=5", "seconds=int(os.environ['LIMIT'])"))
    block = re.search(
        r"^(export .*)\nsrun bash -c '(torchrun (?:.*\n)+?.*)'$", section("Networks"), re.M
    )
    command = f"{block[1].replace('ib0', 'eth0')}\n{block[2]} 1 {' '.join(SMALL)}"
    assert path.name in command

    def launch(change=("", ""), limit=60):
        changed = command.replace(*change) if change[0] else command
        if limit < 60:
            changed = changed.replace("--rdzv-conf=", f"--rdzv-conf=read_timeout={limit},")
        return [
            machines.terminal(n, changed, tmp_path, SLURM_NODEID=str(n - 1), LIMIT=str(limit))
            for n in (1, 2)
        ]

    return launch


@SLOW
def test_names_of_another_network(launch):
    one, two = launch()
    with one, two:
        for job in (one, two):
            assert job.wait().returncode == 0, job
    assert epochs(one) == [1]


@pytest.mark.weekly("waits for gloo's timeouts; the preflight's tests find the interface")
def test_the_wrong_interface(launch):
    one, two = launch(("GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth1"), limit=3)
    with one, two:
        for job in (one, two):
            assert job.wait().returncode == 1, job
    error = "RuntimeError: Gloo connectFullMesh failed with .+"
    assert re.search(rf"^{error}No route to host, remote=\[{DEAD}.1\]", two.stderr, re.M), two
    assert re.search(rf"^{error} Connect timeout", one.stderr, re.M), one


@SLOW
def test_no_names_for_the_addresses(machines, tmp_path):
    machines.names({})
    store = "import torch.distributed as dist; dist.TCPStore('{}.1', 29400, 2, is_master={})"
    jobs = [
        machines.terminal(number, f'python -c "{store.format(LIVE, number == 1)}"', tmp_path)
        for number in (1, 2)
    ]
    with jobs[0], jobs[1]:
        for job in jobs:
            assert job.wait().returncode == 0, job
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
        link = socket.create_connection((host, int(port)), 10)
        link.setblocking(False)
        if junk:
            link.send(junk)
        links.append(link)  # stays open
print("sent", flush=True)
time.sleep(600)
"""
KEYS = """\
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("node1", 29400, is_master=False, timeout=timedelta(seconds=30))
store.set("from a stranger", "anything")
print(store.get("from a stranger").decode())
print(store.get("torch.rendezvous.none.0/MASTER_ADDR").decode())
"""
GATE = """\
        while self.epochs_run == 1 and not os.path.exists("go"):
            time.sleep(0.01)
        self.model.train()
"""


@pytest.mark.weekly("two runs beside three strangers; it shows that nothing happens")
def test_a_stranger_connects(machines, tmp_path, trained):
    """Random bytes on each port before and during training are harmless; keys are set and read."""
    short = ("minutes=5", "seconds=20")
    path = edited(tmp_path, "04", short, ("        self.model.train()\n", GATE))
    for name, text in (("junk.py", JUNK), ("keys.py", KEYS)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    train = "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"
    train += f" --rdzv-endpoint=node1:29400 {path.name} {' '.join(LONG)}"
    with (
        machines.terminal(1, train, tmp_path) as one,
        machines.terminal(2, f"until [ -e join ]; do sleep 0.1; done; {train}", tmp_path) as two,
    ):
        one.wait_for(lambda: 29400 in machines.listening(1))
        with machines.terminal(3, "python junk.py node1:29400", tmp_path) as early:
            early.wait_for("^sent$")
            (tmp_path / "join").touch()
            one.wait_for("^epoch 1 ")
            places = {n: machines.listening(n) for n in (1, 2)}
            assert {"*", f"{LIVE}.1"} == set(places[1].values())  # stores; gloo has its own
            assert {f"{LIVE}.2"} == set(places[2].values())
            everywhere = " ".join(f"node{n}:{port}" for n in places for port in places[n])
            with machines.terminal(3, f"python junk.py {everywhere}", tmp_path) as late:
                late.wait_for("^sent$")
                with machines.terminal(3, "python keys.py", tmp_path) as keys:
                    assert keys.wait().stdout == "anything\nnode1\n", keys
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
