"""Each recipe's printed command works, and reaches the accuracy of step 5."""

import re

import patches
import pytest
from gpt import held_out
from support.jobs import finished
from support.results import epochs
from support.scripts import NEEDS_PATCH, ON_PATH, ROOT

PAGES = {path.stem: path for path in sorted(ROOT.glob("recipes/*.md"))}
PAGES = {name: path for name, path in PAGES.items() if name not in patches.NOT_PATCHES}
STEP_5 = (98, 359)  # at least 98 % of 359 digits are read
EXCEPTIONS = {
    "bf16": (90, 359),  # of a smaller model: see SLOW
    "early_stopping": (98, 179),  # the other half chose the model, and are not counted
    "fp16_scaler": (90, 359),  # of a smaller model: see SLOW
    "sweep": (95, 180),  # with a learning rate that Optuna has drawn; the half that may choose
    "huggingface": (75, 359),  # a transformer learns more slowly
    "gan": (93, 359),  # the digit reader also learns to tell real digits from generated ones
}
ONE_EPOCH = ("tensor_parallel", "two_dimensional")  # much to send, so slow on CPUs
SLOW = dict.fromkeys(["bf16", "fp16_scaler"], " --width 8")  # or they take minutes on a CPU


OF_A_GPT = [name for name, path in PAGES.items() if "\n--- exercise/" in path.read_text("utf-8")]


def ended(copy, name):
    """Type the command of a page; return the Result."""
    text = PAGES[name].read_text(encoding="utf-8")
    command = re.search(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert f"patch -o {name}.py " in command
    env = {f"WANDB_{kind}_DIR": str(copy) for kind in ("CACHE", "CONFIG", "DATA")}
    env |= {"WANDB_MODE": "offline", "TORCHINDUCTOR_CACHE_DIR": str(copy / "compiled"), **ON_PATH}
    command = f"{command.rstrip()}{SLOW.get(name, '')}"
    if name in ONE_EPOCH:
        command = re.sub(" 2$", " 1", command)
    return finished(["bash", "-c", command], copy, env, timeout=600)


@pytest.mark.weekly
@NEEDS_PATCH
@pytest.mark.parametrize("name", sorted(PAGES.keys() - OF_A_GPT))
def test_recipe_ends_well(copy, name):
    job = ended(copy, name)
    # W&B prints after the script's last line.
    *_, (percent, total) = re.findall(r"^accuracy ([\d.]+)% \(\d+/(\d+)\)$", job.stdout, re.M)
    least, wanted = EXCEPTIONS.get(name, STEP_5)
    assert float(percent) >= least
    assert int(total) == wanted


@pytest.mark.weekly
@NEEDS_PATCH
@pytest.mark.parametrize("name", OF_A_GPT)
def test_a_gpt_ends_well(copy, name):
    """It ends far from the loss of chance, 4.6, and prints what it writes."""
    job = ended(copy, name)
    assert epochs(job) == ([1] if name in ONE_EPOCH else [1, 2])
    assert held_out(job) < (3 if name in ONE_EPOCH else 2.7)
    assert len(job.stdout.partition("held-out loss ")[2]) > 100
