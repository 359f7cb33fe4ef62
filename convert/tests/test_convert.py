"""The pair of scripts does what the front page says; so do the lines for other kinds of script."""

import re
import sys
import textwrap

import pytest
import torch
from checking import fork_ranks, named, own_folder, passed, told  # noqa: F401
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
    (
        "    torch.manual_seed(0)\n",
        "    torch.set_default_dtype(torch.float64)\n    torch.manual_seed(0)\n",
    ),
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


DEVICE = '    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
NAMED = (DEVICE, f"{DEVICE}    rank, world_size = dist.get_rank(), dist.get_world_size()\n")
MODEL = "    model = nn.parallel.DistributedDataParallel(model)"
SAMPLER = "    sampler = torch.utils.data.DistributedSampler(train_set)"
SEED = "        torch.manual_seed(epoch + 1000 * dist.get_rank())"
SET_EPOCH = "        sampler.set_epoch(epoch)  # or every epoch has the same order\n"
LOOP = "        for batch in loader:\n"
LOSS = "            loss = cross_entropy(model(images), labels)\n"
BACKWARD = "            loss.backward()\n"
STEP = f"            optimizer.zero_grad()\n{BACKWARD}            optimizer.step()\n"
START = 'if __name__ == "__main__":\n'
KINDS = {  # title of an entry: changes that make the pair's script one of that kind
    "It has no epochs": lambda lines: [
        ("import os\n", "import itertools\nimport os\n"),
        ("def main(", f"{lines(0)}\n\ndef main("),
        (MODEL, f"    batches = endless(loader)\n{MODEL}"),
        (SET_EPOCH, ""),
        (LOOP, LOOP.replace("loader", "itertools.islice(batches, 23)")),
    ],
    "It counts in steps": lambda lines: [
        (MODEL, f"    max_steps, eval_every, warm_up = 92, 46, 9\n{lines(4)}{MODEL}"),
        ("range(start, epochs)", "range(start, max_steps // eval_every)"),
        (LOOP, LOOP.replace("batch in loader", "_, batch in zip(range(eval_every), loader)")),
        ("import os\n", "import itertools\nimport os\n"),
    ],
    "Its sampler draws": lambda lines: [
        ("TensorDataset, random", "TensorDataset, WeightedRandomSampler, random"),
        (
            SAMPLER,
            f"    weights = torch.rand(1440)\n{lines(4)}    {SAMPLER[4:].replace('sampler =', '_ =')}",
        ),
        (SET_EPOCH, ""),
    ],
    "The loss is a mean over tokens": lambda lines: [
        (
            LOSS,
            LOSS.replace("loss", "logits").replace(
                "cross_entropy(model(images), labels)", "model(images)"
            )
            + "            labels = labels.where(labels > 2, -100)\n"
            + lines(12),
        ),
        ("loss.item() * len(labels)", "loss.item() * count.item() / world_size"),
        ("seen += len(labels)", "seen += (labels != -100).sum().item()"),
    ],
    "Everything is global": lambda lines: [
        ("def main(epochs=30):\n", 'epochs = 3\ndist.init_process_group("gloo")\nif epochs:\n'),
        (DDP[DDP.index(START) :], lines(0)),
    ],
    "It has a GradScaler": lambda _: [
        (MODEL, f'    scaler = torch.amp.GradScaler("cpu")\n{MODEL}'),
        (BACKWARD, BACKWARD.replace("loss", "scaler.scale(loss)")),
        (
            "            optimizer.step()\n",
            "            scaler.step(optimizer)\n            scaler.update()\n",
        ),
    ],
    "A progress bar": lambda lines: [
        ("from torch import nn\n", "from torch import nn\nfrom tqdm import tqdm\n"),
        (LOOP, lines(8)),
        (STEP, f"{STEP}            bar.set_postfix(loss=loss.item())\n"),
    ],
    "It prints accuracies": lambda _: [
        ("loss_sum, seen = 0.0, 0\n", "loss_sum, correct, seen = 0.0, 0, 0\n"),
        (
            LOSS,
            "            logits = model(images)\n            correct += (logits.argmax(dim=1) == labels).sum().item()\n"
            + LOSS.replace("model(images)", "logits"),
        ),
        ("[loss_sum, seen]", "[loss_sum, correct, seen]"),
        ("loss_sum, seen = sums", "loss_sum, correct, seen = sums"),
        ("{valid_loss:.4f},", "{correct / seen:.2%}, {valid_loss:.4f},"),
    ],
    "It has several models": lambda _: [
        (
            MODEL,
            f"    head = nn.Sequential(nn.Linear(10, 10))\n    head = nn.parallel.DistributedDataParallel(head)\n    of_head = torch.optim.SGD(head.parameters(), lr=0.1)\n{MODEL}",
        ),
        (LOSS, LOSS.replace("model(images)", "head(model(images))")),
        (STEP, f"            of_head.zero_grad()\n{STEP}            of_head.step()\n"),
        ("evaluate(model.module,", "evaluate(nn.Sequential(model.module, head.module),"),
    ],
    "It has a --device flag": lambda lines: [
        (
            DEVICE,
            f'    args = SimpleNamespace(device="cuda:1" if torch.cuda.is_available() else "cpu")\n{lines(4)}    device = torch.device(args.device)\n',
        ),
        ("import os\n", "import os\nfrom types import SimpleNamespace\n"),
    ],
    "It draws random numbers": lambda lines: [
        ("import os\n", "import os\nimport random\n"),
        ("import torch\n", "import numpy as np\nimport torch\n"),
        (SEED, lines(8) + SEED),
        (
            "cross_entropy(model(images)",
            "cross_entropy(model(images + 0.1 * np.random.rand() + 0.1 * random.random())",
        ),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("title", KINDS)
def test_the_lines_for(title, own_folder, fork_ranks, tmp_path):  # noqa: F811
    """Trained as the page says, the checker finds nothing wrong with it."""
    (entry,) = re.findall(rf"^### {title}.*\n((?:(?!##+ ).*\n)*)", PAGE, re.MULTILINE)
    lines = "".join(re.findall(r"^```python\n(.*?)^```$", entry, re.MULTILINE | re.DOTALL))
    changes = KINDS[title](lambda spaces: textwrap.indent(lines, " " * spaces))
    path = script(tmp_path, *changes)
    write(path, path.read_text(encoding="utf-8").replace(*SHORT))
    with planned(path) as plan:
        run, verdicts = plan.undisturbed, named(judge(plan.undisturbed))
    assert run.returncode == 0, run.output
    assert told(verdicts) == {}, verdicts
    assert {"weights_agree", "gradients_are_averaged", "order_changes"} <= passed(verdicts)
