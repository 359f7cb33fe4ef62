"""Pitfalls in what the ranks are fed with: the broken script shows the symptom, ours does not."""

import re

import pytest
from conftest import SMALL

EVERYTHING = pytest.mark.everything
STEP = "        for step, (source, targets) in enumerate(self.train_data):\n"
FIRST = (
    STEP,
    f"{STEP}            if step == 0:\n                log(f'first {{targets[:8].tolist()}}')\n",
)


def test_no_set_epoch(both):
    jobs = both("no_set_epoch", FIRST, args=("3", *SMALL))
    orders = [len(set(re.findall("^first (.*)$", job.stdout, re.MULTILINE))) for job in jobs]
    assert orders == [1, 3]
