"""The lines of "The order of everything" run on two ranks, and its arrows point the right way."""

import re

import pytest
from support.jobs import run
from support.scripts import ROOT, forked

BEFORE = """\
import os
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
print(end="learned\\n")
dist.barrier()
del ddp_model
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "model", "said"),
    [
        ("", "", ""),
        ("model.backbone.requires_grad_(False)", "model", "Expected to have finished reduction"),
        (
            'model.load_state_dict(saved["MODEL_STATE"])',
            "ddp_model",
            'Missing key(s) in state_dict: "module._orig_mod.',
        ),
    ],
    ids=["as printed", "frozen after DDP", "loaded after DDP"],
)
def test_the_order_of_everything(tmp_path, line, model, said):
    text = (ROOT / "diffs" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    lines = code.replace("compile(model)", 'compile(model, backend="eager")')
    if line:
        assert lines.count(f"{line}\n") == 1
        late = line.replace("model", model, 1)
        lines = lines.replace(f"{line}\n", "").replace("(compiled)\n", f"(compiled)\n{late}\n")
    script = tmp_path / "order.py"
    script.write_text("\n".join([BEFORE, lines, AFTER]), encoding="utf-8")
    job = run(forked(script), tmp_path)
    assert bool(job.returncode) == bool(said), job
    assert said in job.stderr
    assert job.stdout.count("learned") == (0 if said else 2), job
