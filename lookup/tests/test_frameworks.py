"""The programs beside lookup/frameworks.md, and what lookup/ says about the frameworks."""

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
    pytest.mark.skipif(MISSING, reason="needs: pip install -r lookup/requirements.txt"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def program(folder, name, line, more, *changes):
    """Write a program of lookup/ beside step 5, with more lines before this one."""
    edited(folder, "05")
    text = (ROOT / "lookup" / f"with_{name}.py").read_text(encoding="utf-8")
    return write(folder / "program.py", SAY + text, [(line, more + line), *changes])


def run(path, *args, env=None):
    """Run a program on two ranks; return the Result, and what ranks 0 and 1 said, as lists."""
    job = finished(forked(path, *args), path.parent, env)
    return job, said(job, 0), said(job, 1)


def score(job):
    """Return (correct, total) of the line with the accuracy."""
    [found] = re.findall(r"^accuracy [\d.]+% \((\d+)/(\d+)\)$", job.stdout, re.MULTILINE)
    return tuple(map(int, found))


def correct(model):
    """Return how many digits a model reads here."""
    images, labels = load("05").load_datasets()[1].tensors
    with torch.inference_mode():
        return int((model(images).argmax(dim=1) == labels).sum())


ACCELERATE = """
from accelerate import skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data.distributed import DistributedSampler

def seen(loader):
    return [batch.tolist() for batch in loader]

say("ranks", accelerator.num_processes, type(model).__name__)
say("gathered", sum(len(accelerator.gather(targets)) for _, targets in test_loader))
say("kept", sum(len(accelerator.gather_for_metrics(targets)) for _, targets in test_loader))
plain = accelerator.prepare(DataLoader(range(8), 2))
say("dealt", seen(plain), seen(skip_first_batches(plain, 1)))
sampler = DistributedSampler(range(16), shuffle=False)
say("dealt again", seen(accelerator.prepare(DataLoader(range(16), 2, sampler=sampler))))
accelerator.load_state(f"{args.checkpoint_path}.state1")
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


@pytest.mark.gpu
def test_accelerate(tmp_path, trained):
    gather = blocks("How do I gather tensors of different sizes?")[1]
    more = f"{ACCELERATE}{gather}say('padded', out.tolist())\n"
    path = program(tmp_path, "accelerate", "model, optimizer = accelerator.free", more)
    job, one, two = run(path, *ONE)
    assert one[:3] == two[:3] == ["ranks 2 DistributedDataParallel", "gathered 384", "kept 359"]
    assert one[3:5] == ["dealt [[0, 1], [4, 5]] [[4, 5]]", "dealt again [[0, 2], [8, 10]]"]
    assert two[3:5] == ["dealt [[2, 3], [6, 7]] [[6, 7]]", "dealt again [[5, 7], [13, 15]]"]
    assert one[5] == two[5] == "scheduler 6"
    assert one[6] == two[6]
    assert one[7] != two[7]
    assert one[8] == two[8] == "padded [[0, 0, 9], [1, 1, 1]]"
    state = tmp_path / "checkpoint.pt.state1"
    files = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]
    assert sorted(path.name for path in state.iterdir()) == files  # and no epoch
    step_5 = trained("05", *ONE)
    assert score(job) == score(step_5)
    torch.save({"MODEL_STATE": load_file(state / "model.safetensors")}, tmp_path / "accelerate.pt")
    assert same_bits(tmp_path / "accelerate.pt", step_5)


def test_accelerate_without_a_gpu(tmp_path):
    """Both ranks believe that they are alone, and do not notice it."""
    lines = "from accelerate import Accelerator\na = Accelerator()\n"
    lines += "say(a.process_index, a.num_processes, a.is_main_process, a.distributed_type.value)\n"
    _, one, two = run(write(tmp_path / "alone.py", SAY + lines))
    assert one == two == ["0 1 True NO"]


FABRIC = """
state = {"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer, "EPOCHS_RUN": 0}
fabric.load(args.checkpoint_path, state)
say("loaded", state["EPOCHS_RUN"])
fabric.seed_everything(args.seed)
say("same", torch.rand(()).item())
"""


@pytest.mark.gpu
def test_fabric(tmp_path, trained):
    two_epochs = ("2", *SMALL)
    path = program(tmp_path, "fabric", BARRIER, FABRIC)
    job, one, two = run(path, *two_epochs, env={"TORCHELASTIC_RUN_ID": "none"})  # as torchrun does
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
again = Trainer(Digits(), arguments, data_collator=collate, train_dataset=train_set)
again.train(resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-51")  # mid-epoch
pairs = zip(trainer.model.state_dict().values(), again.model.state_dict().values())
say("resumed", all(torch.equal(a, b) for a, b in pairs), again.state.global_step)
del again
"""


@pytest.mark.gpu
def test_trainer(tmp_path):
    half = ('save_strategy="epoch"', 'save_strategy="steps", save_steps=51')
    first, then = blocks("Every rank tokenizes"), blocks("The Hugging Face Trainer on several GPUs")
    more = TRAINER.replace("PRINTED", "".join(first + then))
    job, one, two = run(program(tmp_path, "trainer", BARRIER, more, half), *ONE)
    assert one == two
    assert one[:2] == ["wrapped DistributedDataParallel Digits", "defaults 1.0 linear 1800"]
    assert one[3:] == ["one after the other True", "resumed True 102"]
    assert "find_unused_parameters=True was specified in DDP constructor" in job.stderr
    assert job.stdout.count("ParallelMode.DISTRIBUTED 2") == 2
    saved = tmp_path / "checkpoint.pt.trainer" / "checkpoint-102"
    model = load("05").build_model(width=4)
    weights = load_file(saved / "model.safetensors")
    model.load_state_dict({key.removeprefix("layers."): t for key, t in weights.items()})
    assert score(job) == (correct(model), 359)
    state = torch.load(saved / "scheduler.pt", weights_only=True)
    assert set(state["_last_lr"]) == {0}  # the learning rate has fallen to zero


@pytest.mark.gpu
def test_huggingface(tmp_path):
    """What `save_pretrained` wrote is loaded without DDP, and reads as many digits."""
    from transformers import AutoModelForImageClassification  # slow, and not always there

    job, _, _ = run(patched(tmp_path, "recipes/huggingface"), *ONE)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint.pt.hf").eval()
    torch.save({"MODEL_STATE": model.state_dict()}, tmp_path / "loaded.pt")
    assert same_bits(tmp_path / "loaded.pt", job)
    assert score(job) == (correct(lambda images: model(images).logits), 359)
