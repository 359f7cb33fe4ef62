"""Step 4 on machines with several networks, without Slurm, and with strangers on the network."""

import re
import shutil

import psutil
import pytest
import torch.distributed as dist
from clusters import in_the_guide
from machines import DEAD, LIVE
from support.results import epochs, same_bits
from support.scripts import LONG, ROOT, SCRIPT, SMALL, Pickled, edited

SLOW = pytest.mark.slow
PYTORCH = pytest.mark.weekly("what PyTorch does, on its newest version")


@pytest.mark.weekly("one more way to start two nodes, as slurm/tests/test_nodes.py does often")
def test_two_terminals(machines, tmp_path, trained):
    """Run the page's command in a folder on each machine; with a copied file, they resume."""
    page = (ROOT / "without_slurm" / "README.md").read_text(encoding="utf-8")
    (typed,) = set(re.findall(r"^node\d\$ (torchrun .*\\\n.*)$", page, re.MULTILINE))
    folders = [tmp_path / name for name in ("node1", "node2")]
    for folder in folders:
        folder.mkdir()
        shutil.copy(SCRIPT["04"], folder)
    for args, expected in ((("2", *SMALL), [1, 2]), (LONG, [3, 4])):
        one, two = machines.on_both(f"cd $(hostname); {typed} {' '.join(args)}", tmp_path)
        assert (epochs(one), two.stdout) == (expected, "")
        shutil.copy(folders[0] / "checkpoint.pt", folders[1])
    assert same_bits(folders[0] / "checkpoint.pt", trained("03", *LONG))


@pytest.fixture
def command(machines, tmp_path):
    """The guide's command for nodes with a second name, in a network that connects them."""
    machines.names({"node{}": DEAD, "node{}i": LIVE})
    edited(tmp_path, "04")
    block = r"^(export .*)\nsrun bash -c '(torchrun (?:.*\n)+?.*)'$"
    settings, launch = in_the_guide(block)
    return f"{settings.replace('ib0', 'eth0')}\n{launch} 1 {' '.join(SMALL)}"


@SLOW
def test_names_of_another_network(machines, command, tmp_path):
    one, _ = machines.on_both(command, tmp_path)
    assert epochs(one) == [1]


@PYTORCH
def test_a_store_listens_everywhere_and_asks_for_no_password():
    store = dist.TCPStore("localhost", 0, is_master=True)
    store.set("key", "value")
    assert dist.TCPStore("localhost", store.port, is_master=False).get("key") == b"value"
    places = [each.laddr for each in psutil.Process().net_connections() if not each.raddr]
    (listening,) = [place.ip for place in places if place.port == store.port]
    assert listening in ("::", "0.0.0.0")  # without IPv6


@PYTORCH
def test_gather_object_runs_what_it_receives(process_group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dist.gather_object(Pickled(), [None])
    assert (tmp_path / "executed").is_dir()
