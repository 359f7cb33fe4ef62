"""The calculator on the page computes what lookup/which.py does."""

import random

import pytest
import which
from browser import NEEDS_BROWSER, check_figure
from playwright.sync_api import expect

FIGURE = "#fig-which-one"
COMPUTED = 'every => every.map(({limit, ...job}) => figures["which-one"].computed(job, limit))'
pytestmark = NEEDS_BROWSER


def test_it_computes_what_python_does(visit):
    draw = random.Random(0)
    choices = {
        "nodes": [1, 2, 3, 16, 500],
        "gpus": [1, 2, 4, 8],
        "tokens": [128, 4096, 100_000],
        "mixed": [True, False],
        "checkpointed": [True, False],
        "limit": [16e9, 40e9, 80e9, 141e9],
    }
    every = [
        {"parameters": 10 ** draw.uniform(7, 12)}
        | {name: draw.choice(some) for name, some in choices.items()}
        for _ in range(300)
    ]
    chosen = set()
    for settings, found in zip(every, visit("#recipes").evaluate(COMPUTED, every), strict=True):
        limit = settings.pop("limit")
        layers, width = which.shape(settings["parameters"])
        job = which.Job(layers=layers, width=width, **settings)
        ways = {way: (memory, fits) for way, memory, *_, fits in found["ways"]}
        for way in which.WAYS:
            memory, fits = ways[way]
            assert memory == pytest.approx(which.memory(way, job)), (way, settings)
            assert fits == which.fits(way, job, limit)
        way = which.recommended(job, limit)
        assert found["recommended"] == way or way is None
        chosen.add(way)
    assert chosen == {*which.WAYS, None}


def test_it_opens_with_an_example_and_obeys_the_keyboard(visit):
    figure = visit("#recipes").locator(FIGURE)
    job = which.Job(3e9, *which.shape(3e9), nodes=2, gpus=4, tokens=4096)
    shown = figure.locator("tbody tr").all()
    shown = [row.locator("th, td").all_text_contents()[:5] for row in shown]
    for row in which.rows(job, 40e9):
        assert [*row] in shown
    expect(figure.locator(".said")).to_contain_text("fits into 40.0 GB per GPU: hybrid")
    expect(figure.locator(".chosen th")).to_have_text("hybrid")
    nodes = figure.get_by_label("Nodes")
    nodes.focus()
    nodes.press("ArrowDown")
    expect(figure.locator(".said")).to_contain_text("FSDP2 (recipes/fsdp2_gpt.md)")


@pytest.mark.slow
def test_it_is_accessible_and_fits(visit):
    check_figure(visit("#recipes", "phone", color_scheme="dark"), FIGURE)
