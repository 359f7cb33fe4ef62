"""The calculator on the page computes what lookup/which.py does."""

import random

import pytest
import which
from browser import NEEDS_BROWSER, check_figure
from patching import page
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
        for way, memory, sent, fits in found["ways"]:
            assert memory == pytest.approx(which.memory(way, job)), (way, settings)
            assert sent == pytest.approx(which.sent(way, job)), (way, settings)
            assert fits == which.fits(way, job, limit)
        assert [way for way, *_ in found["ways"]] == list(which.WAYS)
        assert found["recommended"] == which.recommended(job, limit)
        chosen.add(found["recommended"])
    assert len(chosen) > 5


def test_it_opens_with_the_worked_example_and_obeys_the_keyboard(visit):
    figure = visit("#recipes").locator(FIGURE)
    for row in figure.locator("tbody tr").all():
        cells = row.locator("th, td").all_text_contents()
        assert f"| {' | '.join(cells)} |" in page("lookup/which")
    said = figure.locator(".said")
    expect(said).to_contain_text("fits into 40.0 GB per GPU: hybrid (recipes/hybrid_sharding.md)")
    expect(figure.locator(".chosen th")).to_have_text("hybrid")
    nodes = figure.get_by_label("Nodes")
    nodes.focus()
    nodes.press("ArrowDown")
    expect(said).to_contain_text("FSDP2 (recipes/fsdp2_gpt.md)")
    nodes.fill("")
    expect(said).to_contain_text("Nodes: type a whole number that is in range, from 1 to 10000.")
    nodes.fill("2")
    figure.get_by_label("Tokens").fill("16384")
    expect(said).to_contain_text("With activation checkpointing: hybrid.")
    figure.get_by_label("Activation checkpointing").press("Space")
    expect(said).to_contain_text("hybrid (recipes/")


@pytest.mark.slow
def test_it_is_accessible_and_fits(visit):
    shown = visit("#recipes", "phone", color_scheme="dark")
    expect(shown.locator(f"{FIGURE} tbody tr")).to_have_count(7)
    check_figure(shown, FIGURE)
