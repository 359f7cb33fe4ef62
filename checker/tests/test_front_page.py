"""The lines of the front page make a right script of one that trains on one GPU."""

import re
import sys
import textwrap

import pytest
from support.jobs import finished
from support.results import said
from support.scripts import ROOT, forked

PLAIN = '''
# imports
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Augments each sample with noise."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 8, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        source = self.inputs[index]
        return source + 0.1 * torch.randn_like(source), source.sum()


# first of all
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train_set, test_set, batch_size, path = Noisy(120), Noisy(31), 8, "model.pt"
# the training data
loader = DataLoader(train_set, batch_size, shuffle=True)
hidden = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]
model = nn.Sequential(*hidden, nn.Linear(16, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if os.path.exists(path):
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epochs"]
# the model, on its device and with its checkpoint loaded; the optimizer may be made before


def log(loss):
    print(f"epoch {epoch + 1} loss {loss.item():.4f}", flush=True)


def save(weights):
    state = {"model": weights, "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


@torch.no_grad()
def evaluate(model):
    model.eval()
    batches = DataLoader(test_set, batch_size)
    error = sum((model(x.to(device))[:, 0] - y.to(device)).square().sum() for x, y in batches)
    print(f"error {error / len(test_set):.4f}", flush=True)


for epoch in range(first, 4):
    # each epoch: a new order, and random numbers of its own on each rank
    model.train()
    losses = []
    for source, targets in loader:
        optimizer.zero_grad()
        output = model(source.to(device))[:, 0]
        loss = nn.functional.mse_loss(output, targets.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    loss = torch.stack(losses).mean()
    # the loss to print, a tensor on the device; if it is a float, torch.tensor(loss, device=device)
    # what one rank does for all: print, save, evaluate; a scheduler takes its step on all ranks
    log(loss)
    save(model.state_dict())
    evaluate(model)
# last of all, after the function that holds the model has returned
'''


def applied(diff, text):
    """Return a script to which a diff is applied whose context is comments of the script."""
    for comment, lines in re.findall(r"^ (# .*)\n((?:[+-].*\n)+)", diff, re.MULTILINE):
        place = rf"^( *){re.escape(comment)}\n((?:.*\n)*)"
        indent, after = re.search(place, text, re.MULTILINE).groups()
        before = text[: len(text) - len(after)]
        removed, added = ("".join(re.findall(rf"^\{mark}(.*\n)", lines, re.M)) for mark in "-+")
        removed, added = textwrap.indent(removed, indent), textwrap.indent(added, indent)
        assert after.startswith(removed), f"{removed!r} does not follow {comment!r}"
        text = before + added + after.removeprefix(removed)
    return text


@pytest.mark.slow
def test_the_checker_calls_them_right(tmp_path):
    """With BatchNorm, dropout, augmentation, a checkpoint and an evaluation, and each drill."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(applied(diff, PLAIN), encoding="utf-8")
    drills = [word for name in ("kill", "world-size") for word in ("--drill", name)]
    words = [sys.executable, "-m", "ddp_check", *drills, script]
    job = finished(words, tmp_path, {"PYTHONPATH": str(ROOT / "checker")}, timeout=600)
    assert "FAIL" not in job.stdout
    assert "WARN" not in job.stdout


PRINTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.ones(1, requires_grad=True)
loss = (1 + dist.get_rank()) * weight.sum()
LINES
loss.backward()
print(f"rank {dist.get_rank()}: {mean_loss.item()} {weight.grad.item()}\\n", end="")
dist.destroy_process_group()
"""


def test_the_loss_to_print_may_be_computed_before_backward(tmp_path):
    """The mean is that of both ranks, and each gradient is what it would be without it."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^ # the loss to print.*\n((?:\+.*\n)+)", page, re.MULTILINE)
    program = PRINTED.replace("LINES\n", re.sub(r"^\+", "", lines, flags=re.MULTILINE))
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    job = finished(forked(tmp_path / "program.py"), tmp_path)
    assert said(job, 0) + said(job, 1) == ["1.5 1.0", "1.5 2.0"]
