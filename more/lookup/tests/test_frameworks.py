"""The programs beside more/lookup/frameworks.md, and the recipe for a model of Hugging Face."""

import importlib.util
import re

import pytest
import torch
from patching import patched
from safetensors.torch import load_file
from support.jobs import finished
from support.results import said, same_bits
from support.scripts import ROOT, SMALL, edited, forked, load, on_each_rank, write

DRAWS = "import torch.distributed as dist\n" + on_each_rank("torch.rand(()).item()")
MISSING = not importlib.util.find_spec("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING, reason="needs: pip install -r more/lookup/requirements.txt"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun sets it, for Fabric


def ran(folder, name, epochs):
    """Run a program beside step 5 on two ranks, which draw the same random number at the end."""
    edited(folder, "05")
    text = (ROOT / "more" / "lookup" / f"with_{name}.py").read_text(encoding="utf-8")
    end = re.search(r"^(model, optimizer = accelerator.free.*|dist\.barrier\(\))\n", text, re.M)[0]
    path = write(folder / "program.py", text, [(end, DRAWS + end)])
    job = finished(forked(path, epochs, *SMALL), folder)
    assert len(said(job, 0)) == 1
    assert said(job, 0) == said(job, 1)
    return job


def score(job):
    """Return (correct, total) of the line with the accuracy."""
    [found] = re.findall(r"^accuracy [\d.]+% \((\d+)/(\d+)\)$", job.stdout, re.MULTILINE)
    return tuple(map(int, found))


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_it_ends_with_the_bits_of_step_5(name, tmp_path, trained):
    step_5 = trained("05", "2", *SMALL)
    assert score(ran(tmp_path, name, "2")) == score(step_5)
    again = ran(tmp_path, name, "2")  # which only loads what was saved
    if name == "accelerate":
        state = tmp_path / "checkpoint.pt.state2"
        files = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]
        assert sorted(path.name for path in state.iterdir()) == files  # and no epoch
        saved = {"MODEL_STATE": load_file(state / "model.safetensors")}
        torch.save(saved, tmp_path / "checkpoint.pt")
    assert same_bits(again, step_5)
    assert score(again) == score(step_5)


def test_trainer(tmp_path):
    job = ran(tmp_path, "trainer", "1")
    assert "find_unused_parameters=True was specified in DDP constructor" in job.stderr
    saved = tmp_path / "checkpoint.pt.trainer" / "checkpoint-102"
    model = load("05").build_model(width=4)
    weights = load_file(saved / "model.safetensors")
    model.load_state_dict({key.removeprefix("layers."): t for key, t in weights.items()})
    images, labels = load("05").load_datasets()[1].tensors
    with torch.inference_mode():
        assert score(job) == (int((model(images).argmax(dim=1) == labels).sum()), 359)


def test_huggingface(tmp_path):
    """What `save_pretrained` wrote is loaded without DDP, and has the same weights."""
    from transformers import AutoModelForImageClassification  # slow, and not always there

    job = finished(forked(patched(tmp_path, "more/recipes/huggingface"), "1", *SMALL), tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint.pt.hf").eval()
    torch.save({"MODEL_STATE": model.state_dict()}, tmp_path / "loaded.pt")
    assert same_bits(tmp_path / "loaded.pt", job)
