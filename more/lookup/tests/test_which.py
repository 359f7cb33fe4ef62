"""The table and the figure about ways of splitting are computed."""

import random
import re
import sys

import pytest
import which
from browser import NEEDS_BROWSER, check
from patching import page
from support.jobs import finished

FIGURE = "#fig-which-one"
COMPUTED = 'every => every.map(({limit, ...job}) => figures["which-one"].computed(job, limit))'


def test_the_table_is_computed(tmp_path):
    text = page("more/lookup/large_models")
    (words,) = re.findall(r"^python more/lookup/which.py (.+)$", text, re.MULTILINE)
    printed = finished([sys.executable, which.__file__, *words.split()], tmp_path).stdout
    assert printed.splitlines()[-1] == "The simplest that fits: hybrid"
    pattern = r"^\| ([\d.]+) billion \| (\d+) GB \| (\d+) \S (\d+) \| (yes|no) \| (.*) \| (.*) \|$"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) == 6
    for billions, limit, nodes, gpus, checkpointed, name, memory in rows:
        size = 1e9 * float(billions)
        shape = size, *which.shape(size), int(nodes), int(gpus), 4096
        job = which.Job(*shape, checkpointed=checkpointed == "yes")
        way = which.recommended(job, 1e9 * int(limit))
        assert (name, memory) == (which.WAYS[way], f"{sum(which.memory(way, job)) / 1e9:.1f} GB")


@NEEDS_BROWSER
def test_the_figure_computes_the_same_and_is_accessible(visit):
    draw = random.Random(0)
    choices = {"nodes": [1, 2, 3, 16, 500], "gpus": [1, 2, 4, 8], "tokens": [128, 4096, 100_000]}
    choices |= {"mixed": [True, False], "checkpointed": [True, False], "limit": [16e9, 80e9, 141e9]}
    choices["parameters"] = [number * 10**power for number in (1, 3) for power in range(7, 13)]
    every = [{name: draw.choice(some) for name, some in choices.items()} for _ in range(300)]
    figure, chosen = visit("#recipes", "phone", color_scheme="dark"), set()
    for settings, found in zip(every, figure.evaluate(COMPUTED, every), strict=True):
        limit = settings.pop("limit")
        layers, width = which.shape(settings["parameters"])
        job = which.Job(layers=layers, width=width, **settings)
        ways = {way: (memory, fits) for way, memory, *_, fits in found["ways"]}
        for way in which.WAYS:
            assert ways[way] == (pytest.approx(which.memory(way, job)), which.fits(way, job, limit))
        way = which.recommended(job, limit)
        assert found["recommended"] == way or way is None
        chosen.add(way)
    assert chosen == {*which.WAYS, None}
    check(figure, FIGURE)
