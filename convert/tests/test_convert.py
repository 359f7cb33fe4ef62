"""The pair of scripts does what the front page says; so do the lines for other kinds of script."""

import re
import sys
import textwrap

import pytest
import torch
from checking import fork_ranks, judged, named, own_folder, passed, told  # noqa: F401
from ddp_check.report import perform, planned
from ddp_check.rules import judge
from ddp_check.rules.base import NONE, PASS
from support.jobs import finished
from support.scripts import ROOT, forked, write

FOLDER = ROOT / "convert"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
DDP = (FOLDER / "train_ddp.py").read_text(encoding="utf-8")
SHORT = ("epochs=30", "epochs=3")
DOUBLE = [  # rounding then changes nothing that is seen
    ("dtype=torch.float32", "dtype=torch.float64"),
    ("    torch.manual_seed(0)\n", "    torch.set_default_dtype(torch.float64)\n    torch.manual_seed(0)\n"),
]


def script(folder, *changes):
    return write(folder / "train_ddp.py", DDP, changes)


# ---------------------------------------------------------------- the pair


def test_two_ranks_follow_one_with_twice_the_batch(tmp_path):
    """Until all stop: the scheduler has lowered the learning rate twice, alike on both ranks."""
    saved = []
    for ranks, batch in ((1, 64), (2, 32)):
        (folder := tmp_path / str(ranks)).mkdir()
        path = script(folder, *DOUBLE, ("batch_size=32", f"batch_size={batch}"))
        job = finished(forked(path, nprocs=ranks), folder)
        saved.append((job.stdout, torch.load(folder / "best.pt")))
    (one, first), (two, second) = saved
    assert one == two
    assert 3 < one.count("epoch") < 30
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=1e-6)


def test_one_gpu_script_learns(tmp_path):
    job = finished([sys.executable, FOLDER / "train.py"], tmp_path)
    assert float(re.findall(r"([\d.]+)%", job.stdout)[-1]) > 96


@pytest.mark.slow
def test_the_checker_finds_nothing_wrong(own_folder, fork_ranks, tmp_path):  # noqa: F811
    with planned(script(tmp_path, SHORT)) as plan:
        verdicts = named(judge(plan.undisturbed))
        drills = {name: perform(name, plan) for name in ("kill", "sigterm", "world-size")}
    assert told(verdicts) == {}
    seen = {"ranks_share_data", "weights_agree", "one_rank_writes", "each_sample_is_evaluated_once"}
    assert seen <= passed(verdicts)
    (unhandled,) = drills.pop("sigterm")
    assert unhandled.status == NONE
    found = [verdict for verdicts in drills.values() for verdict in verdicts]
    assert {verdict.status for verdict in found} == {PASS}, found


# ---------------------------------------------------------------- other kinds of script


def printed(title):
    """Return the block of Python code in the entry with this title."""
    (entry,) = re.findall(rf"^### {re.escape(title)}.*\n((?:(?!##+ ).*\n)*)", PAGE, re.MULTILINE)
    (block,) = re.findall(r"^```python\n(.*?)^```$", entry, re.MULTILINE | re.DOTALL)
    return block


def inside(title, spaces):
    return textwrap.indent(printed(title), " " * spaces)


DEVICE = '    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
RANKS = "    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
NAMED = (DEVICE, DEVICE + RANKS)
MAIN, SEED = "def main(", "        torch.manual_seed(epoch + 1000 * dist.get_rank())"
SET_EPOCH = "        sampler.set_epoch(epoch)  # or every epoch has the same order\n"
FOR, LOSS = "        for batch in loader:\n", "            loss = cross_entropy(model(images), labels)\n"
SAMPLER = "    sampler = torch.utils.data.DistributedSampler(train_set)"
MODEL = "    model = nn.parallel.DistributedDataParallel(model)"
STEP = "            optimizer.zero_grad()\n            loss.backward()\n            optimizer.step()\n"
GLOBAL = [
    (f"{MAIN}epochs=3):\n", "if True:\n"),
    ("if __name__", "if True or __name__"),
    ("    main()\n", ""),
]
KINDS = {  # title of an entry: changes that make the pair's script one of that kind
    "It has no epochs": [
        (MAIN, printed("It has no epochs") + "\n\ndef main("),
        ("import os\n", "import itertools\nimport os\n"),
        (MODEL, f"    batches = endless(loader)\n{MODEL}"),
        (SET_EPOCH, ""),
        (FOR, FOR.replace("loader", "itertools.islice(batches, 23)")),
    ],
    "It counts in steps": [
        NAMED,
        (MODEL, "    max_steps, eval_every, warm_up = 60, 12, 6\n"
        f"{inside('It counts in steps', 4)}    assert max_steps == 30\n{MODEL}"),
    ],
    "Its sampler draws with replacement": [
        NAMED,
        ("import os\n", "import os\nfrom torch.utils.data import WeightedRandomSampler\n"),
        (SAMPLER, "    weights = torch.ones(1440)\n"
        f"{inside('Its sampler draws with replacement', 4)}    other{SAMPLER[4:]}"),
        (SET_EPOCH, ""),
    ],
    "It calls another method": [],
}
