"""The lines of "The order of everything" run on two ranks; a layer cannot be frozen after DDP."""

import re

import pytest
from support.jobs import finished, run
from support.scripts import ROOT, forked, write

BEFORE = """\
from collections import OrderedDict
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def Net():
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    return nn.Sequential(OrderedDict(backbone=nn.Linear(4, 4), head=head))


dist.init_process_group("gloo")
device, total_epochs = torch.device("cpu"), 2
torch.manual_seed(0)
saved = {"MODEL_STATE": Net().state_dict()}
torch.manual_seed(dist.get_rank())
"""
AFTER = """
rate = scheduler.get_last_lr()
for _ in range(total_epochs):
    optimizer.zero_grad()
    ddp_model(torch.randn(8, 4)).square().sum().backward()  # each rank has other data
    optimizer.step()
    scheduler.step()
state = model.state_dict()
assert state.keys() == saved["MODEL_STATE"].keys()
changed = {name for name in state if not state[name].equal(saved["MODEL_STATE"][name])}
assert "head.1.weight" in changed and "backbone.weight" not in changed, changed
assert len(optimizer.state) == 4 and scheduler.get_last_lr() < rate
dist.barrier()
del ddp_model
dist.destroy_process_group()
"""
FREEZE = "model.backbone.requires_grad_(False)\n"
WRAP = "ddp_model = DDP(compiled)\n"


@pytest.mark.slow
def test_the_order_of_everything(tmp_path):
    text = (ROOT / "diffs" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = code.replace("compile(model)", 'compile(model, backend="eager")')
    script = write(tmp_path / "order.py", f"{BEFORE}{code}{AFTER}")
    finished(forked(script), tmp_path)
    late = write(tmp_path / "late.py", script.read_text(), [(FREEZE, ""), (WRAP, WRAP + FREEZE)])
    assert "finished reduction" in run(forked(late), tmp_path).stderr
