"""The table of lookup/large_models.md is computed, and close to what is counted."""

import re
import statistics
import sys

import pytest
import which
from patching import page
from support.jobs import finished

LAYOUTS = {  # of the recipes' four ranks: (nodes, GPUs per node)
    "zero_optimizer": (1, 4),
    "fsdp2_gpt": (1, 4),
    "hybrid_sharding": (2, 2),
}


def test_the_table_is_computed(tmp_path):
    text = page("lookup/large_models")
    (words,) = re.findall(r"^python lookup/which.py (.+)$", text, re.MULTILINE)
    printed = finished([sys.executable, which.__file__, *words.split()], tmp_path).stdout
    assert printed.splitlines()[-1] == "The simplest that fits: hybrid"
    pattern = r"^\| ([\d.]+) billion \| (\d+) GB \| (\d+) \S (\d+) \| (yes|no) \| (.*) \| (.*) \|$"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) == 7
    for billions, limit, nodes, gpus, checkpointed, name, memory in rows:
        size = 1e9 * float(billions)
        shape = size, *which.shape(size), int(nodes), int(gpus), 4096
        job = which.Job(*shape, checkpointed=checkpointed == "yes")
        way = which.recommended(job, 1e9 * int(limit))
        assert (name, memory) == (which.WAYS[way], f"{sum(which.memory(way, job)) / 1e9:.1f} GB")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_formulae_are_close_to_what_the_recipe_counts(name):
    """The numbers on the recipe's page are those that its test counts."""
    text = page(f"recipes/{name}")
    counted = int(re.search(r"\(([\d,]+) parameters\)", text)[1].replace(",", ""))
    job = which.Job(counted, 2, 64, *LAYOUTS[name], 32 * 64, mixed=False)
    cells = re.findall(r"^\| (?:parameters|optimizer) .* per rank .*\|(.*)\|$", text, re.MULTILINE)
    assert len(cells) == 2
    found = [[int(n.replace(",", "")) for n in re.findall(r"\d[\d,]+", cell)] for cell in cells]
    assert sum(map(statistics.mean, found)) == pytest.approx(which.memory(name, job)[0], rel=0.08)
