"""The figures on who gets which sample deal as PyTorch and the scripts do."""

import json
import random
from collections import Counter

import orders
import pytest
from playwright.sync_api import expect
from browser import NEEDS_BROWSER, check_figure
from support.scripts import ROOT, load
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

FIGURE, EVALUATION = "#fig-who-gets-which", "#fig-who-is-counted"
DEAL = """([every, data]) => {
  const { deal, count } = figures["who-gets-which"];
  return every.map(sets => {
    const dealt = deal(sets, data);
    const counts = Object.entries(dealt).map(([way, own]) => [way, count(own, sets.samples)]);
    return [dealt, Object.fromEntries(counts)];
  });
}"""


def some_settings(draw):
    return {
        "samples": draw.randint(1, orders.SAMPLES),
        "ranks": draw.randint(1, 8),
        "batch": draw.randint(1, 4),
        "shuffle": draw.random() < 0.8,
        "dropLast": draw.random() < 0.4,
        "setEpoch": draw.random() < 0.8,
        "seed": draw.randrange(orders.SEEDS),
        "epoch": draw.randrange(orders.EPOCHS),
        "resume": draw.choice([0, 1, 2, 3, 5]),
    }


def sampled(kind, sets, rank, samples_run=0):
    """Return the indices that a sampler deals to a rank in an epoch."""
    options = {"shuffle": sets["shuffle"], "drop_last": sets["dropLast"], "seed": sets["seed"]}
    sampler = kind(range(sets["samples"]), sets["ranks"], rank, **options)
    if sets["setEpoch"]:
        sampler.set_epoch(sets["epoch"])
    sampler.samples_run = samples_run
    return list(sampler)


def dealt(sets, resumable):
    """Return what the figure should: {way: [indices of rank 0, of rank 1, …]}."""
    ranks = range(sets["ranks"])
    distributed = [sampled(DistributedSampler, sets, rank) for rank in ranks]
    batches = list(BatchSampler(distributed[0], sets["batch"], drop_last=False))
    samples_run = sum(len(batch) for batch in batches[: sets["resume"]]) * sets["ranks"]
    return {
        "distributed": distributed,
        "resumable": [sampled(resumable, sets, rank, samples_run) for rank in ranks],
        "range": [list(range(rank, sets["samples"], sets["ranks"])) for rank in ranks],
    }


def counted(shards, samples):
    times = Counter(index for shard in shards for index in shard)
    return {
        "counted": times.total(),
        "never": [index for index in range(samples) if times[index] == 0],
        "again": [index for index in range(samples) if times[index] > 1],
        "times": [times[index] for index in range(samples)],
    }


def test_the_shuffled_orders_are_pytorchs():
    assert orders.FILE.read_text(encoding="utf-8") == orders.table() + "\n"


@NEEDS_BROWSER
def test_a_thousand_deals_are_those_of_the_samplers(browser):
    page = browser.new_page()
    page.add_script_tag(path=ROOT / "diffs" / "generator" / "figures.js")
    page.add_script_tag(path=ROOT / "diffs" / "figures" / "who-gets-which.js")
    data = json.loads(orders.FILE.read_text(encoding="utf-8"))
    draw, resumable = random.Random(0), load("04").ResumableSampler
    every = [some_settings(draw) for _ in range(1000)]
    for sets, (deal, counts) in zip(every, page.evaluate(DEAL, [every, data]), strict=True):
        wanted = dealt(sets, resumable)
        assert deal == wanted, sets
        assert counts == {way: counted(own, sets["samples"]) for way, own in wanted.items()}, sets


def shown(figure, way):
    """Return what is drawn for each rank: [[(text, classes)]]."""
    rows = figure.locator(".way").nth(way).locator("tr").all()
    cells = "all => all.map(e => [e.firstChild.data, e.className.replace('cell', '').trim()])"
    return [row.locator(".cell").evaluate_all(cells) for row in rows]


@NEEDS_BROWSER
def test_the_evaluation_counts_the_padding(visit):
    figure = visit(EVALUATION).locator(EVALUATION)
    own = [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    marks = [[""] * 4, ["", "", "", "again"], ["", "", "", "again"]]
    wanted = [[[str(i), mark] for i, mark in zip(*both)] for both in zip(own, marks)]
    assert shown(figure, 0) == wanted
    assert shown(figure, 1) == [[[str(i), ""] for i in range(rank, 10, 3)] for rank in range(3)]
    verdicts = figure.locator(".verdict").all_text_contents()
    assert [text.partition(".")[0] for text in verdicts] == [
        "An evaluation counts 12 samples instead of 10",
        "An evaluation counts 10 samples, each once",
    ]
    said = figure.get_by_role("status")
    expect(said).to_contain_text("reports 83.3% instead of 90.0%")
    figure.get_by_label("drop_last").check()
    expect(said).to_contain_text("if only sample 9 is misread, it reports 100.0% instead of 90.0%")
    figure.get_by_label("Samples").fill("9")
    expect(said).to_have_text(
        "Padding. None is needed: all ranks get the same number of samples, each once."
    )
    figure.get_by_label("drop_last").uncheck()
    figure.get_by_label("Samples").fill("2")
    figure.get_by_label("Ranks").select_option("8")  # each sample four times: 50% either way
    expect(said).to_contain_text("deals samples 0 and 1 more than once")
    expect(said).to_contain_text("each equally often, so here the accuracy happens to be right")
    figure.get_by_label("Samples").fill("40")
    expect(said).to_contain_text("The figure deals 1 to 30, so it shows 30.")
    expect(figure.locator(".orders .cell").nth(29)).to_be_visible()


@NEEDS_BROWSER
def test_it_says_what_set_epoch_and_the_resume_do(visit):
    figure = visit(FIGURE).locator(FIGURE)
    rows = figure.locator(".orders tr")
    figure.get_by_role("button", name="Next epoch").press("Enter")
    expect(rows.nth(1)).to_have_class("now")
    texts = (
        "all => all.map(e => [...e.querySelectorAll('.plain')].map(i => i.textContent).join(''))"
    )
    different = {text for text in rows.evaluate_all(texts) if text}
    assert len(different) == 4
    for _ in range(3):
        figure.get_by_role("button", name="Next epoch").click()
    figure.get_by_role("button", name="Back to epoch 0").click()
    expect(rows.nth(0)).to_have_class("now")
    figure.get_by_label("set_epoch").uncheck()
    said = figure.get_by_role("status")
    expect(said).to_contain_text("every epoch has the order of epoch 0")
    assert len({text for text in rows.evaluate_all(texts) if text}) == 1
    before = shown(figure, 1)
    figure.get_by_label("Resume after").select_option("1")
    for way, mark in ((0, "repeated"), (1, "done")):
        assert shown(figure, way) == [
            [*([text, mark] for text, _ in row[:2]), *row[2:]] for row in before
        ]
    assert figure.get_by_label("Resume after").locator("option").all_inner_texts() == ["0", "1"]
    expect(said).to_contain_text("The checkpoint says that 6 samples of the epoch are done.")


@pytest.mark.slow
@NEEDS_BROWSER
@pytest.mark.parametrize(
    ("scheme", "size"),
    [("dark", "phone"), pytest.param("light", "laptop", marks=pytest.mark.weekly)],
)
def test_it_is_accessible(visit, scheme, size):
    page = visit(FIGURE, size, color_scheme=scheme)
    figure = page.locator(FIGURE)
    figure.get_by_label("set_epoch").uncheck()
    figure.get_by_label("drop_last").check()
    figure.get_by_label("Resume after").select_option("1")
    check_figure(page, FIGURE)
    check_figure(visit(EVALUATION, size, color_scheme=scheme), EVALUATION)
