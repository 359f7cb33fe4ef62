"""Each recipe's printed command works, and reaches the accuracy of step 5."""

import re
import shutil

import patches
import pytest
from patching import NEEDS_PATCH, page
from support.jobs import finished
from support.scripts import ON_PATH, ROOT, SCRIPTS

pytestmark = [pytest.mark.weekly("each printed command at full size"), NEEDS_PATCH]
PAGES = sorted({path.stem for path in ROOT.glob("more/recipes/*.md")} - {*patches.NOT_PATCHES})
SMALLER = dict.fromkeys(["bf16", "fp16_scaler"], " --width 8")  # or they take minutes on a CPU
LEAST = {"bf16": 90, "fp16_scaler": 90, "huggingface": 75}  # of 100 digits; otherwise 98


@pytest.mark.parametrize("name", PAGES)
def test_recipe_ends_well(tmp_path, name):
    (tmp_path / "more").symlink_to(ROOT / "more")
    for path in SCRIPTS:  # which `patch` would refuse as links
        shutil.copy(path, tmp_path)
    text = page(f"more/recipes/{name}")
    command = re.search(r"^```bash\n(.*?)\n```$", text, re.M | re.S)[1] + SMALLER.get(name, "")
    env = {f"WANDB_{kind}_DIR": str(tmp_path) for kind in ("CACHE", "CONFIG", "DATA")}
    env |= {"WANDB_MODE": "offline", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    job = finished(["bash", "-c", command], tmp_path, {**env, **ON_PATH}, timeout=900)
    if "\n--- more/exercise/" in text:
        assert float(re.search(r"^held-out loss (.+)$", job.stdout, re.M)[1]) < 2.7  # chance is 4.6
    else:
        *_, percent = re.findall(r"^accuracy ([\d.]+)% \(", job.stdout, re.M)  # W&B prints below it
        assert float(percent) >= LEAST.get(name, 98)
