"""Each recipe's command, as it is printed on its page, ends where step 5 does."""

import re

import pytest
from support.jobs import finished
from support.scripts import NEEDS_PATCH, ON_PATH, ROOT

PAGES = {path.stem: path for path in sorted(ROOT.glob("recipes/*.md")) if path.stem != "README"}
STEP_5 = (98, 359)  # it reads at least so many per cent of so many digits
EXCEPTIONS = {
    "early_stopping": (98, 179),  # half of them have chosen the model, and are not counted
    "fp16_scaler": (90, 359),  # of a smaller model: see SLOW
    "gan": (93, 359),  # the digit reader also learns to tell real digits from generated ones
}
SLOW = {"fp16_scaler": " --width 8"}  # float16 takes minutes on a CPU, at the default width


@pytest.mark.repetition
@NEEDS_PATCH
@pytest.mark.parametrize("name", PAGES)
def test_recipe_ends_well(copy, name):
    text = PAGES[name].read_text(encoding="utf-8")
    command = re.search(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert f"patch -o {name}.py " in command
    env = {f"WANDB_{kind}_DIR": str(copy) for kind in ("CACHE", "CONFIG", "DATA")}
    env |= {"WANDB_MODE": "offline", "TORCHINDUCTOR_CACHE_DIR": str(copy / "compiled"), **ON_PATH}
    command = f"{command.rstrip()}{SLOW.get(name, '')}"
    job = finished(["bash", "-c", command], copy, env, timeout=600)
    # W&B prints more after the script's last line.
    *_, (percent, total) = re.findall(r"^accuracy ([\d.]+)% \(\d+/(\d+)\)$", job.stdout, re.M)
    least, wanted = EXCEPTIONS.get(name, STEP_5)
    assert float(percent) >= least
    assert int(total) == wanted
