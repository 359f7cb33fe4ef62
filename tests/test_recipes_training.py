"""Recipes that change how a step of the training is taken."""

import re

import pytest
from conftest import command, edited, finished, patched, weights
from test_02_multigpu_spawn import DOUBLE

EVERYTHING = pytest.mark.everything


def test_accumulation(tmp_path):
    """Groups of four batches, and a shorter one, are four times the batch; each all-reduces once.

    A rank has 6471 samples: 32 whole groups of 4 x 50, and a last one of 50 and 21.
    """
    counted = (
        "    trainer.train(",
        "    reduced = []\n"
        "    counting = default_hooks.allreduce_hook\n"
        "    trainer.model.register_comm_hook(\n"
        "        None, lambda state, bucket: reduced.append(1) or counting(None, bucket)\n"
        "    )\n"
        "    trainer.train(",
    )
    hooks = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    imported = ("from torch import nn\n", f"from torch import nn\n{hooks}")
    said = ("    dist.barrier()", '    log(f"{len(reduced)} all-reduces")\n    dist.barrier()')
    changes = (*DOUBLE, imported, counted, said)
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    parts.mkdir()
    whole.mkdir()
    recipe = patched(parts, "recipes/accumulation", *changes)
    step_5 = edited(whole, "05", *changes)
    jobs = [
        finished(command(recipe, "1", "--batch-size=50", "--width=2"), parts),
        finished(command(step_5, "1", "--batch-size=200", "--width=2"), whole),
    ]
    counts = [re.findall(r"^(\d+) all-reduces$", job.stdout, re.MULTILINE) for job in jobs]
    assert counts == [["33"], ["33"]]
    one, other = (weights(job) for job in jobs)
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-9
