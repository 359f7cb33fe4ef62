"""The programs beside more/lookup/frameworks.md, and the recipe for a model of Hugging Face."""

import re

import pytest
import torch
from patching import patched
from safetensors.torch import load_file
from support.jobs import finished
from support.results import accuracy, printed_by, same_bits
from support.scripts import ROOT, SMALL, edited, forked, on_each_rank, write

ENV = {"HF_HUB_OFFLINE": "1", "TORCHELASTIC_RUN_ID": "none"}  # torchrun sets the second
DRAWS = "import torch.distributed as dist\n" + on_each_rank("torch.rand(()).item()")
pytestmark = [pytest.mark.slow, pytest.mark.gpu]


def ran(folder, name, epochs):
    """Run a program beside step 5 on two ranks, which then draw the same random number."""
    edited(folder, "05")
    text = (ROOT / "more" / "lookup" / f"with_{name}.py").read_text(encoding="utf-8")
    line = re.search(r"^(model\.eval|step5\.evaluate|metrics =).*\n", text, re.MULTILINE)[0]
    path = write(folder / "program.py", text, [(line, DRAWS + line)])
    job = finished(forked(path, epochs, *SMALL), folder, ENV)
    assert len(printed_by(job, 0)) == 1
    assert printed_by(job, 0) == printed_by(job, 1)
    return job


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_it_ends_with_the_bits_of_step_5(name, tmp_path, trained):
    """Also after a resume, in which the second epoch has its own order."""
    step_5 = trained("05", "2", *SMALL)
    ran(tmp_path, name, "1")
    again = ran(tmp_path, name, "2")
    if name == "accelerate":
        state = tmp_path / "checkpoint.pt.state2"
        saved = {"MODEL_STATE": load_file(state / "model.safetensors")}
        torch.save(saved, tmp_path / "checkpoint.pt")
    assert same_bits(again, step_5)
    assert accuracy(again) == accuracy(step_5)


def test_trainer(tmp_path):
    job = ran(tmp_path, "trainer", "1")
    assert "find_unused_parameters=True was specified in DDP constructor" in job.stderr
    assert accuracy(job)[0] > 70


def test_huggingface(tmp_path):
    """What `save_pretrained` wrote is loaded without DDP, and has the same weights."""
    from transformers import AutoModelForImageClassification  # slow, and not always there

    job = finished(forked(patched(tmp_path, "more/recipes/huggingface"), "1", *SMALL), tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint.pt.hf").eval()
    torch.save({"MODEL_STATE": model.state_dict()}, tmp_path / "loaded.pt")
    assert same_bits(tmp_path / "loaded.pt", job)
