"""The programs beside more/lookup/frameworks.md, and what more/lookup/ says of the frameworks."""

import importlib.util
import re

import pytest
import torch
from pages import blocks
from patching import patched
from safetensors.torch import load_file
from support.jobs import finished
from support.results import said, same_bits
from support.scripts import ROOT, SMALL, edited, forked, load, write

ONE = ("1", *SMALL)
BARRIER = "dist.barrier()\n"
SAY = """\
from os import environ

def say(*what):
    print(f"rank {environ['RANK']}: {' '.join(map(str, what))}\\n", end="", flush=True)

"""

MISSING = not importlib.util.find_spec("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING, reason="needs: pip install -r more/lookup/requirements.txt"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def run(folder, name, line, more, *args, env=None):
    """Run a program of more/lookup/ beside step 5 on two ranks, with more lines before this one.

    Return the Job, and what ranks 0 and 1 said, as lists.
    """
    edited(folder, "05")
    text = (ROOT / "more" / "lookup" / f"with_{name}.py").read_text(encoding="utf-8")
    path = write(folder / "program.py", SAY + text, [(line, more + line)])
    job = finished(forked(path, *args), folder, env)
    return job, said(job, 0), said(job, 1)


def score(job):
    """Return (correct, total) of the line with the accuracy."""
    [found] = re.findall(r"^accuracy [\d.]+% \((\d+)/(\d+)\)$", job.stdout, re.MULTILINE)
    return tuple(map(int, found))


ACCELERATE = """
from accelerate.utils import set_seed

say("ranks", accelerator.num_processes, type(model).__name__)
scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
for _ in range(3):
    optimizer.step()
    scheduler.step()
say("scheduler", scheduler.scheduler.last_epoch)
set_seed(0)
say("same", torch.rand(()).item())
set_seed(0, device_specific=True)
say("own", torch.rand(()).item())
from types import SimpleNamespace
tokenizer = SimpleNamespace(pad_token_id=9)
out = torch.full((1, 2 + accelerator.process_index), accelerator.process_index)
"""


def test_accelerate(tmp_path, trained):
    gather = blocks("How do I gather tensors of different sizes?")[1]
    more = f"{ACCELERATE}{gather}say('padded', out.tolist())\n"
    job, one, two = run(tmp_path, "accelerate", "model, optimizer = accelerator.free", more, *ONE)
    assert one[:2] == two[:2] == ["ranks 2 DistributedDataParallel", "scheduler 6"]
    assert one[2] == two[2]
    assert one[3] != two[3]
    assert one[4] == two[4] == "padded [[0, 0, 9], [1, 1, 1]]"
    state = tmp_path / "checkpoint.pt.state1"
    files = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]
    assert sorted(path.name for path in state.iterdir()) == files  # and no epoch
    step_5 = trained("05", *ONE)
    assert score(job) == score(step_5)
    torch.save({"MODEL_STATE": load_file(state / "model.safetensors")}, tmp_path / "accelerate.pt")
    assert same_bits(tmp_path / "accelerate.pt", step_5)


FABRIC = """
state = {"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer, "EPOCHS_RUN": 0}
fabric.load(args.checkpoint_path, state)
say("loaded", state["EPOCHS_RUN"])
fabric.seed_everything(args.seed)
say("same", torch.rand(()).item())
"""


def test_fabric(tmp_path, trained):
    two_epochs, env = ("2", *SMALL), {"TORCHELASTIC_RUN_ID": "none"}  # as torchrun sets it
    job, one, two = run(tmp_path, "fabric", BARRIER, FABRIC, *two_epochs, env=env)
    assert one == two
    assert one[0] == "loaded 2"
    step_5 = trained("05", *two_epochs)
    assert same_bits(job, step_5)
    assert score(job) == score(step_5)


TRAINER = """
import time
from types import SimpleNamespace

def prepare(_):
    start = time.time()
    time.sleep(0.5)
    return start, time.time()

say("wrapped", type(trainer.model_wrapped).__name__, type(trainer.model).__name__)
say("defaults", arguments.max_grad_norm, arguments.lr_scheduler_type.value, arguments.ddp_timeout)
say("same", torch.rand(()).item())
training_args, tokenize, data = arguments, None, SimpleNamespace(map=prepare)
PRINTED
spans = [None, None]
dist.all_gather_object(spans, data)
say("one after the other", spans[0][1] <= spans[1][0])
"""


def test_trainer(tmp_path):
    first, then = blocks("Every rank tokenizes"), blocks("The Hugging Face Trainer on several GPUs")
    more = TRAINER.replace("PRINTED", "".join(first + then))
    job, one, two = run(tmp_path, "trainer", BARRIER, more, *ONE)
    assert one == two
    assert one[:2] == ["wrapped DistributedDataParallel Digits", "defaults 1.0 linear 1800"]
    assert one[3:] == ["one after the other True"]
    assert "find_unused_parameters=True was specified in DDP constructor" in job.stderr
    assert job.stdout.count("ParallelMode.DISTRIBUTED 2") == 2
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

    job = finished(forked(patched(tmp_path, "more/recipes/huggingface"), *ONE), tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint.pt.hf").eval()
    torch.save({"MODEL_STATE": model.state_dict()}, tmp_path / "loaded.pt")
    assert same_bits(tmp_path / "loaded.pt", job)
