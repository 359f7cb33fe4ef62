"""The batch files, as far as they can be told right without a cluster."""

import re
import subprocess

import pytest
from conftest import ROOT, SCRIPTS

FILES = [ROOT / "slurm" / f"{path.stem}.sbatch" for path in SCRIPTS]
NODES = {
    "01": (1, 1),
    "02": (1, 2),
    "03": (1, 2),
    "04": (2, 4),
    "05": (2, 4),
}  # nodes, GPUs on each


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_batch_file(path):
    text = path.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", path], check=True)
    assert text.startswith("#!/bin/bash\n")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert len(options) == len(re.findall(r"SBATCH", text))  # a misspelt one is but a comment
    nodes, gpus = NODES[path.name[:2]]
    assert options["partition"] == "gpu"
    assert options["nodes"] == str(nodes)
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == str(gpus)
    assert options["cpus-per-task"] == str(18 * gpus)
    assert options["time"] == "00:05:00"
    (launch,) = re.findall(r"^srun (?:.*\\\n)*.*", text, re.MULTILINE)
    assert launch.endswith(f'{path.stem}.py "$@"') or f" {path.stem}.py " in launch
    assert launch.endswith('"$@"')
    assert ("torchrun" in launch) == (path.name >= "03")
    assert text.rstrip().endswith(launch)  # so that the job's state is that of the training
