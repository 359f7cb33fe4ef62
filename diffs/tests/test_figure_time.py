"""The figure on where the time goes shows what was recorded, and redraws it by timeline.py."""

import importlib
import json
import random

import pytest
from playwright.sync_api import expect
from browser import NEEDS_BROWSER, check_figure
from support.scripts import ROOT

FIGURE = "#fig-where-the-time-goes"
DATA = json.loads((ROOT / "diffs" / "figures" / "where-the-time-goes.json").read_text("utf-8"))
PARTS = ("data", "forward", "backward", "waiting", "optimizer", "all-reduce")
CHOSEN = """every => {
  const { chosen } = figures["where-the-time-goes"];
  const data = JSON.parse(document.getElementById("where-the-time-goes-data").textContent);
  return every.map(({ ranks, slower, batch, passes, no_sync }) =>
    chosen(data.records[ranks], data.network, { slower, batch, passes, no_sync }));
}"""


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def figure(visit):
    return visit("#recipes").locator(FIGURE)


def spans(rank):
    """Return the spans of a rank as one list of numbers, with the parts in order."""
    return [moment for name in sorted(rank) for span in rank[name] for moment in span]


# ---------------------------------------------------------------- the model


def test_a_step_is_redrawn_as_calculated_by_hand(benchmark):
    """Both ranks compute for 10 ms, twice as long with twice the batch; an all-reduce takes 8."""
    rank = {"data": [[0, 1]], "forward": [[1, 4]], "backward": [[4, 10]], "waiting": [[10, 11]]}
    rank |= {"optimizer": [[11, 13]], "ready": [[6, 6], [10, 10]], "all-reduce": [[6, 8], [10, 11]]}
    record = {"ranks": [rank, rank], "bucket_bytes": [750, 250]}
    forecasted = benchmark("timeline").forecasted
    network = (0, 4e-6)  # two messages of 500 bytes: 4 ms
    (step, _) = forecasted(record, network, slower=2)
    assert step["all-reduce"] == [(6, 12), (12, 14)]
    assert (step["waiting"], step["optimizer"]) == ([(10, 14)], [(14, 16)])
    (step, _) = forecasted(record, network, batch=2)
    assert step["all-reduce"] == [(12, 15), (20, 21)]
    (step, _) = forecasted(record, network, passes=2)
    assert step["backward"] == [(4, 10), (14, 20)]
    assert step["all-reduce"] == [(16, 19), (20, 21)]
    (step, _) = forecasted(record, network, passes=2, no_sync=False)
    assert step["all-reduce"] == [(6, 9), (10, 11), (17, 20), (21, 22)]
    assert step["optimizer"] == [(22, 24)]


def test_the_forecast_is_calibrated_as_calculated_by_hand(benchmark):
    """The optimizer starts at 16, so the buckets ready at 6 take 10 ms; the fit says 3 + 1."""
    rank = {"data": [[0, 1]], "forward": [[1, 4]], "backward": [[4, 10]], "waiting": [[10, 16]]}
    rank |= {"optimizer": [[16, 18]], "ready": [[6, 6], [10, 10]]}
    rank["all-reduce"] = [[6, 13], [13, 16]]
    record = {"ranks": [rank, rank], "bucket_bytes": [750, 250]}
    timeline = benchmark("timeline")
    network = timeline.calibrated(record, (0, 4e-6))
    assert network == pytest.approx((0, 1e-5))
    (step, _) = timeline.forecasted(record, network)
    assert step["all-reduce"] == [pytest.approx(span) for span in ((6, 13.5), (13.5, 16))]
    assert step["optimizer"] == [pytest.approx((16, 18))]


@pytest.mark.parametrize("ranks", list(DATA["records"]))
def test_a_slower_network_never_makes_a_step_faster(benchmark, ranks):
    timeline, record = benchmark("timeline"), DATA["records"][ranks]
    network = timeline.calibrated(record, DATA["network"])
    recorded = timeline.end_of(record["ranks"])
    assert timeline.end_of(timeline.forecasted(record, network)) == pytest.approx(recorded)
    for batch, passes, no_sync in ((1, 1, True), (3, 1, True), (1, 4, True), (1, 4, False)):
        lengths = [
            timeline.end_of(timeline.forecasted(record, network, slower, batch, passes, no_sync))
            for slower in range(1, 11)
        ]
        assert lengths == sorted(lengths)
        assert lengths[-1] > lengths[0]
        if batch == passes == 1:
            assert lengths[1] > recorded


def test_the_recorded_step_is_a_step():
    """Each part follows the other, and buckets are sent when ready."""
    for ranks, record in DATA["records"].items():
        assert record["world_size"] == len(record["ranks"]) == int(ranks)
        assert min(rank["data"][0][0] for rank in record["ranks"]) == 0
        for rank in record["ranks"]:
            parts = [moment for name in PARTS[:5] for span in rank[name] for moment in span]
            assert parts == sorted(parts)
            assert len(rank["ready"]) == len(rank["all-reduce"]) == len(record["bucket_bytes"])
            for (ready, _), (start, end) in zip(rank["ready"], rank["all-reduce"], strict=True):
                assert ready <= start < end <= rank["optimizer"][0][0]


@NEEDS_BROWSER
def test_it_is_redrawn_by_the_model(figure, benchmark):
    draw = random.Random(1)
    every = [
        {
            "ranks": draw.choice(list(DATA["records"])),
            "slower": draw.randint(1, 10),
            "batch": draw.randint(1, 8),
            "passes": draw.choice([1, 4]),
            "no_sync": draw.random() < 0.5,
        }
        for _ in range(200)
    ]
    unchanged = {"slower": 1, "batch": 1, "passes": 1, "no_sync": True}
    every += [{"ranks": ranks, **unchanged} for ranks in DATA["records"]]
    for settings, found in zip(every, figure.page.evaluate(CHOSEN, every), strict=True):
        record = DATA["records"][settings.pop("ranks")]
        if settings["slower"] == settings["batch"] == settings["passes"] == 1:
            assert found == record["ranks"]
            continue
        network = benchmark("timeline").calibrated(record, DATA["network"])
        wanted = benchmark("timeline").forecasted(record, network, **settings)
        for mine, theirs in zip(wanted, found, strict=True):
            assert set(mine) == set(theirs)
            assert spans(theirs) == pytest.approx(spans(mine))


# ---------------------------------------------------------------- the drawing


def bars(figure, rank):
    """Return the bars of a rank: {part: [[start, end], ...]}, from where they are drawn."""
    row = figure.locator(f'[data-rank="{rank}"]')
    drawn = row.locator("rect").evaluate_all(
        """all => all.map(bar => {
          const [x, width] = ["x", "width"].map(name => Number(bar.getAttribute(name)));
          return [bar.classList[1], x, x + width, +bar.dataset.start, +bar.dataset.end];
        })"""
    )
    scale = max(bar[2] for bar in drawn) / max(bar[4] for bar in drawn)
    for _, x, right, start, end in drawn:
        assert (x, right) == pytest.approx((scale * start, scale * end))
    return {name: [list(bar[3:]) for bar in drawn if bar[0] == name] for name in PARTS}


@NEEDS_BROWSER
def test_undisturbed_it_is_the_recorded_step(figure):
    for ranks, record in DATA["records"].items():
        figure.get_by_role("radio", name=ranks).check()
        expect(figure.locator(".said")).to_contain_text("Recorded: the step took")
        for number, rank in enumerate(record["ranks"]):
            assert bars(figure, number) == {name: rank[name] for name in PARTS}
            dots = figure.locator(f'[data-rank="{number}"] circle')
            at = dots.evaluate_all("all => all.map(dot => +dot.dataset.at)")
            assert [[moment, moment] for moment in at] == rank["ready"]


@NEEDS_BROWSER
def test_it_is_played_by_keyboard_and_says_how_far_off_it_is(figure, benchmark):
    said, page_rows = figure.locator(".said"), figure.locator("tbody tr")
    record = DATA["records"]["2"]
    for _ in range(3):
        figure.get_by_role("slider", name="Batch").press("ArrowRight")
    network = benchmark("timeline").calibrated(record, DATA["network"])
    step = benchmark("timeline").forecasted(record, network, batch=4)
    assert bars(figure, 1)["waiting"] == [pytest.approx(list(span)) for span in step[1]["waiting"]]
    compared = benchmark("timeline").compared(record, DATA["network"])
    for row, (name, forecast, measured) in zip(page_rows.all(), compared, strict=True):
        _, *cells = row.locator("th, td").all_text_contents()
        error = f"{forecast / measured - 1:+.0%}".replace("-", "\N{MINUS SIGN}")
        assert cells == [f"{forecast:.0f} ms", f"{measured:.0f} ms", error], name
    expect(said).to_contain_text(f"Measured: {compared[1][2]:.0f} ms. This forecast is off by")
    expect(figure.locator(".calibrated")).to_contain_text(
        f"{network[1] / DATA['network'][1]:.1f} times as long"
    )
    readiness = [
        figure.locator(f'[data-rank="{rank}"] circle').evaluate_all(
            "all => all.map(e => +e.dataset.at)"
        )
        for rank in (0, 1)
    ]
    assert readiness == [pytest.approx([at for at, _ in rank["ready"]]) for rank in step]
    assert readiness[0] != readiness[1]
    slower = figure.get_by_role("slider", name="Network")
    slower.press("End")
    expect(slower).to_have_attribute("aria-valuetext", "10 times slower")
    figure.get_by_role("radio", name="4").check()
    expect(said).not_to_contain_text("Measured")
    figure.get_by_role("button", name="Reset").press("Enter")
    expect(figure.get_by_role("radio", name="2")).to_be_checked()
    expect(slower).to_have_attribute("aria-valuetext", "as recorded")
    expect(said).to_contain_text("Recorded: the step took")


@NEEDS_BROWSER
def test_accumulation_is_compared_with_as_many_samples(figure):
    record = DATA["records"]["2"]
    _, with_it, without = (f"{row['milliseconds']:.0f} ms" for row in record["measured"])
    recorded = max(rank["optimizer"][0][1] for rank in record["ranks"])
    for choice in ("4 batches, with no_sync", "4 batches, without no_sync"):
        figure.get_by_label("Accumulate").select_option(label=choice)
        expect(figure.locator(".said")).to_contain_text(
            f"Measured: {with_it} with no_sync, {without} without no_sync."
        )
        then = f"4 recorded steps: {4 * recorded:.0f} ms"
        expect(figure.locator("svg")).to_contain_text(then)


@NEEDS_BROWSER
def test_the_table_has_its_header_on_a_phone(visit):
    figure = visit("#recipes", "phone").locator(FIGURE)
    figure.locator("summary").click()
    heads = [head.bounding_box() for head in figure.locator("thead th").all()]
    cells = [
        cell.bounding_box() for cell in figure.locator("tbody tr").first.locator("th, td").all()
    ]
    for head, cell in zip(heads, cells, strict=True):
        assert head["x"] == pytest.approx(cell["x"], abs=1)
        assert head["height"] > 10


@pytest.mark.slow
@NEEDS_BROWSER
@pytest.mark.parametrize(
    ("scheme", "size"),
    [("dark", "phone"), pytest.param("light", "wide", marks=pytest.mark.weekly)],
)
def test_it_is_accessible(visit, scheme, size):
    page = visit("#recipes", size, color_scheme=scheme)
    page.locator(f"{FIGURE} summary").click()
    check_figure(page, FIGURE)
