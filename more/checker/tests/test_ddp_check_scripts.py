"""How scripts are started, frameworks, and runs that end or write in other ways."""

import textwrap

import pytest
from checking import BASE, before, judged, passed, reported
from ddp_check.rules.base import FRAGILE, WRONG
from support.scripts import write

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]

INIT = '    dist.init_process_group("gloo")\n'
READY = "    for epoch in range(first, 3):\n"
EPOCH = "        sampler.set_epoch(epoch)\n"
LEAVE = "    dist.destroy_process_group()\n"

# ---------------------------------------------------------------- how a script is started


def test_a_flat_script_for_srun(tmp_path):
    """Without a function; the ranks take their numbers from Slurm, and meet elsewhere."""
    head, _, rest = BASE.partition("def main():\n")
    body, _, _ = rest.partition("\n\nif __name__")
    from_slurm = """os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": "2"}
os.environ["MASTER_ADDR"] = "10.255.255.1"
"""
    changes = [("import torch.distributed.nn\n", ""), before("dist.init_process", from_slurm)]
    changes.append(("    dist.all_reduce(total)\n", ""))
    _, verdicts = judged(write(tmp_path / "train.py", head + textwrap.dedent(body), changes))
    assert reported(verdicts) == {"one_group": FRAGILE}
    assert "the ranks meet at 10.255.255.1" in verdicts["one_group"].text


# ---------------------------------------------------------------- other scripts

ALONE = [
    (INIT, ""),
    ("dist.get_rank(), dist.get_world_size()", "0, 1"),
    ("    sampler = DistributedSampler(data)\n", ""),
    ("sampler=sampler", "shuffle=True"),
    ("DDP(net)", "net"),
    (EPOCH, ""),
    ("        dist.all_reduce(total)\n", ""),
    ("evaluate(net, test)", "0"),
    ('os.path.exists("saved.pt")', "False"),
    ('new.pt")\n            os.replace("new.pt", "saved.pt")', 'saved.pt")'),
    ("    dist.barrier()\n", ""),
    (LEAVE, ""),
]


def test_a_script_for_one_process(tmp_path, fork_ranks):
    """What fails is what is left to do."""
    _, verdicts = judged(write(tmp_path / "train.py", BASE, ALONE))
    faults = ("one_group", "weights_agree", "ranks_share_data", "one_rank_writes")
    assert reported(verdicts) == dict.fromkeys(faults, WRONG)


THIS = [
    ("8, sampler=sampler", "8, shuffle=True"),
    ("DDP(net)", "net"),
    ("loss.backward()", "this.backward(loss)"),
]
ACCELERATE = """    from accelerate import Accelerator

    this = Accelerator(cpu=True)
"""
FABRIC = """    from lightning_fabric import Fabric

    this = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    this.launch()
"""
FRAMEWORKS = {  # changes to the base
    "accelerate": [
        (INIT, ACCELERATE),
        before(READY, "    model, optimizer, loader = this.prepare(net, optimizer, loader)\n"),
        (EPOCH, ""),
        ("dist.destroy_process_group()", "this.end_training()"),
    ],
    "lightning_fabric": [
        (INIT, FABRIC),
        before(READY, "    model, optimizer = this.setup(net, optimizer)\n"),
        before(READY, "    loader = this.setup_dataloaders(loader)\n"),
        (EPOCH, EPOCH.replace("sampler", "loader.sampler")),
        (LEAVE, ""),
    ],
}


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_frameworks(tmp_path, fork_ranks, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    run, verdicts = judged(write(tmp_path / "train.py", BASE, THIS + FRAMEWORKS[package]))
    assert reported(verdicts) == {}, run.output
    last = set() if run.returncode else {"weights_agree"}  # not told if a rank aborts at its exit
    assert passed(verdicts) >= {"script_ends", "gradients_are_averaged", "ranks_share_data", *last}
