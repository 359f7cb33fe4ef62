"""Each recipe's printed command works, and reaches the accuracy of step 5."""

import re
import shutil

import patches
import pytest
from patching import NEEDS_PATCH, page
from support.jobs import finished
from support.results import epochs
from support.scripts import ON_PATH, ROOT, SCRIPTS

pytestmark = [pytest.mark.weekly("each printed command at full size"), NEEDS_PATCH]
PAGES = sorted({path.stem for path in ROOT.glob("more/recipes/*.md")} - {*patches.NOT_PATCHES})
LEAST = {  # of 100 digits, 98 are read, but:
    "bf16": 90,  # of a smaller model: see SMALLER
    "fp16_scaler": 90,
    "huggingface": 75,  # a transformer learns more slowly
}
SMALLER = dict.fromkeys(["bf16", "fp16_scaler"], " --width 8")  # or they take minutes on a CPU


def ended(folder, name):
    """Type the command of a page; return the Job."""
    for room in "more/recipes", "more/exercise":
        (folder / room).symlink_to(ROOT / room)
    for path in SCRIPTS:  # which `patch` would refuse as links
        shutil.copy(path, folder)
    command = re.search(r"^```bash\n(.*?)\n```$", page(f"more/recipes/{name}"), re.M | re.S)[1]
    assert f"patch -o {name}.py " in command
    env = {f"WANDB_{kind}_DIR": str(folder) for kind in ("CACHE", "CONFIG", "DATA")}
    env |= {"WANDB_MODE": "offline", "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), **ON_PATH}
    return finished(["bash", "-c", command + SMALLER.get(name, "")], folder, env, timeout=900)


@pytest.mark.parametrize("name", PAGES)
def test_recipe_ends_well(tmp_path, name):
    job = ended(tmp_path, name)
    if "\n--- more/exercise/" in page(f"more/recipes/{name}"):
        assert epochs(job) == [1, 2]
        assert float(re.search(r"^held-out loss (.+)$", job.stdout, re.M)[1]) < 2.7  # chance is 4.6
        assert len(job.stdout.partition("held-out loss ")[2]) > 100  # what the GPT writes
        return
    # W&B prints after the script's last line.
    *_, percent = re.findall(r"^accuracy ([\d.]+)% \(\d+/\d+\)$", job.stdout, re.M)
    assert float(percent) >= LEAST.get(name, 98)
