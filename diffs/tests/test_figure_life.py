"""The figure on the life of a job follows the fault table of tests/README.md."""

import json
import re
from itertools import groupby
from xml.etree import ElementTree

import pytest
from browser import NEEDS_BROWSER, check_figure
from support.scripts import ROOT, SCRIPT

FIGURE = "#fig-life-of-a-job"
DATA = json.loads((ROOT / "diffs" / "figures" / "life-of-a-job.json").read_text(encoding="utf-8"))
TOTAL = DATA["epochs"] * DATA["steps"]
NAMES = [event["name"] for event in DATA["events"]]
EVENTS = {"killed": "A rank is killed (kill -9, out of memory)", "told": "SIGTERM arrives"}
OUTCOMES = """every => {
  const { outcome } = figures["life-of-a-job"];
  const data = JSON.parse(document.getElementById("life-of-a-job-data").textContent);
  return every.map(settings => outcome(data, ...settings));
}"""


def fault_table():
    """Return {fault: (what happens, work lost, tests)}."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    _, _, text = text.partition("| fault | what happens | work lost | shown by |\n")
    lines = [line[1:-1].split(" |") for line in text.split("\n\n")[0].splitlines()[1:]]
    return {
        fault.strip(): (happens.strip(), lost.strip(), re.findall(r"`(test_\w+)`", tests))
        for fault, happens, lost, tests in lines
    }


def steps_in(text):
    """Return the steps that a text names, alone or as a range."""
    found = set()
    for first, last in re.findall(r"\b(0[1-5])(?:–(0[1-5]))?\b", text):  # noqa: RUF001
        found |= {f"{n:02}" for n in range(int(first), int(last or first) + 1)}
    return found


def test_its_rules_are_rows_of_the_fault_table():
    table = fault_table()
    rows = {name: tuple(row.values()) for name, row in DATA["rows"].items()}
    assert rows == {name: table[name] for name in rows}
    used = {
        name
        for event in DATA["events"]
        for outcome in event["outcomes"]
        for name in (outcome["row"], outcome.get("late", outcome["row"]))
    }
    assert used == set(rows)


def test_each_step_follows_a_row_that_is_about_it():
    for event in DATA["events"]:
        steps = [step for outcome in event["outcomes"] for step in outcome["steps"]]
        assert steps == sorted(SCRIPT)
        for outcome in event["outcomes"]:
            named = steps_in(f"{outcome['row']} {DATA['rows'][outcome['row']]['happens']}")
            assert not named or set(outcome["steps"]) <= named


def test_its_run_is_that_of_the_scripts():
    """An epoch has 12,942 samples, two ranks take 128 each; a crash keeps the saved epochs."""
    assert DATA["steps"] == -(-12_942 // (2 * 128))
    for step in ("04", "05"):
        text = SCRIPT[step].read_text(encoding="utf-8")
        assert f"if step % {DATA['asks']} == 0 and self._stop_agreed():" in text
    for step in ("01", "02", "03"):  # SIGTERM ends them
        assert "signal" not in SCRIPT[step].read_text(encoding="utf-8")


def expected(work_lost, save_every, at):
    """Return how many batches a run has trained when it stops, and how many the next one keeps."""
    saves = range(0, TOTAL + 1, save_every * DATA["steps"])
    if work_lost == "since the last save":
        return at, max(save for save in saves if save <= at)
    questions = [n for n in range(TOTAL) if n % DATA["steps"] % DATA["asks"] == 0]
    stopped = min((n for n in questions if n > at), default=TOTAL)
    return stopped, stopped


@pytest.fixture
def figure(visit):
    return visit("#03-to-04")


@NEEDS_BROWSER
def test_what_is_lost_is_what_the_table_says(figure):
    table = fault_table()
    every = [
        (event, step, save_every, at)
        for event in range(len(NAMES))
        for step in SCRIPT
        for save_every in (1, 2, 3)
        for at in (*range(1, TOTAL, 7), TOTAL - 1)
    ]
    for settings, found in zip(every, figure.evaluate(OUTCOMES, every), strict=True):
        _, step, save_every, at = settings
        lost = table[found["row"]][1]
        stopped, kept = expected(lost, save_every, at)
        assert (found["stopped"], found["from"]) == (stopped, kept), settings
        assert found["lost"] == stopped - kept
        assert (found["lost"] == 0) or lost == "since the last save"
        assert found["lost"] <= save_every * DATA["steps"]
        assert found["finished"] == (stopped == TOTAL)
        if found["row"].startswith("SIGTERM fewer than ten steps"):
            assert step in ("04", "05")
            assert at % DATA["steps"] >= DATA["steps"] - 10


def drawn(bar):
    """Return what a bar shows: its stretches of one kind, as [kind, first batch, last batch]."""
    cells = [
        (
            cell.get_attribute("class"),
            *(int(cell.get_attribute(f"data-{n}")) for n in ("from", "to")),
        )
        for cell in bar.locator("rect").all()
    ]
    runs = groupby(enumerate(cells), key=lambda item: item[1][0])
    found = [[kind, *(cell for _, cell in run)] for kind, run in runs]
    return [[kind, cells[0][1], cells[-1][2]] for kind, *cells in found]


@pytest.mark.slow
@NEEDS_BROWSER
def test_it_is_played_by_keyboard_and_read_aloud(figure):
    own = figure.locator(FIGURE)
    bars = {step: own.locator(f'[data-step="{step}"]') for step in SCRIPT}
    at, saved = 3 * DATA["steps"] + 23, 2 * DATA["steps"]
    crash = [["kept", 0, saved], ["lost", saved, at], ["again", saved, at], ["kept", at, TOTAL]]
    said = own.locator(".said")
    assert "Interrupted in epoch 4 of 6, batch 24 of 51." in said.inner_text()
    assert "Steps 1 to 3: 74 batches lost and repeated." in said.inner_text()
    assert "Steps 4 and 5: stopped and saved 7 batches later" in said.inner_text()
    assert all(drawn(bars[step]) == crash for step in ("01", "02", "03"))
    assert drawn(bars["04"]) == [["kept", 0, TOTAL]]
    marks = bars["04"].locator("circle").evaluate_all("all => all.map(e => +e.dataset.at)")
    assert sorted(marks) == [saved, at + 7, 2 * saved, TOTAL]
    for _ in range(7):
        own.get_by_role("slider").press("ArrowRight")
    spoken = own.get_by_role("slider").get_attribute("aria-valuetext")
    assert spoken == "epoch 4 of 6, batch 31 of 51"
    assert "Steps 4 and 5: stopped and saved 10 batches later" in said.inner_text()
    own.locator("summary").press("Enter")
    rules = own.locator(".rules li").all_text_contents()
    assert rules == [test for row in shown_rows(own) for test in DATA["rows"][row]["tests"]]
    for _ in range(7):
        own.get_by_role("slider").press("ArrowLeft")
    own.get_by_label("What happens").select_option(label=EVENTS["killed"])
    assert "Steps 1 to 5: 74 batches lost and repeated." in said.inner_text()
    assert all(drawn(bar) == crash for bar in bars.values())


@NEEDS_BROWSER
def test_the_limit_of_a_job_is_told_ahead(figure):
    """The last batches are trained before the limit: Slurm sends SIGTERM earlier."""
    own = figure.locator(FIGURE)
    own.get_by_label("What happens").select_option(label="A Slurm job nears its time limit")
    for number, step in ((4, "04_multinode"), (5, "05_gather_eval")):
        batch_file = (ROOT / "slurm" / f"{step}.sbatch").read_text(encoding="utf-8")
        (option,) = re.findall(r"^#SBATCH (--signal=\S+)", batch_file, re.MULTILINE)
        assert option in own.locator(f'[data-step="0{number}"] p').inner_text()


@NEEDS_BROWSER
def test_the_time_between_two_runs_is_seen_on_a_phone(visit):
    page = visit("#03-to-04", "phone")
    for gap in page.locator(f"{FIGURE} line.down").all():
        assert gap.bounding_box()["width"] >= 15
    assert page.locator(f"{FIGURE} [name=at]").bounding_box()["height"] >= 24


def shown_rows(own):
    text = own.locator(".rules").inner_text().replace("`", "").lower()
    at = {row: text.find(f"{row}:".replace("`", "").lower()) for row in DATA["rows"]}
    return sorted((row for row in at if at[row] >= 0), key=at.get)


@pytest.mark.slow
@NEEDS_BROWSER
@pytest.mark.parametrize(
    ("scheme", "size"),
    [("dark", "phone"), pytest.param("light", "wide", marks=pytest.mark.weekly)],
)
def test_it_is_accessible(visit, scheme, size):
    page = visit("#03-to-04", size, color_scheme=scheme)
    page.locator(f"{FIGURE} summary").click()
    check_figure(page, FIGURE)


@NEEDS_BROWSER
def test_the_still_picture_shows_what_the_figure_computes(figure):
    path = ROOT / "diffs" / "pictures" / "life-of-a-job.svg"
    rows = {
        row.get("data-row"): [
            (
                cell.get("class").rpartition("-")[2],
                int(cell.get("data-from")),
                int(cell.get("data-to")),
            )
            for cell in row.iter("{http://www.w3.org/2000/svg}rect")
        ]
        for row in ElementTree.parse(path).getroot().iterfind(".//*[@data-row]")
    }
    at = 3 * DATA["steps"] + 23
    places = [NAMES.index(EVENTS[how]) for how in ("killed", "told")]
    settings = zip(places, ("03", "04"), (2, 2), (at, at), strict=True)
    killed, told = figure.evaluate(OUTCOMES, list(settings))
    lost = [cell for cell in rows["killed"] if cell[0] == "lost"]
    again = [cell for cell in rows["killed"] if cell[0] == "again"]
    assert [cell[1:] for cell in lost] == [cell[1:] for cell in again]
    assert (lost[0][1], lost[-1][2]) == (killed["from"], killed["stopped"])
    assert {kind for kind, *_ in rows["told"]} == {"kept"}
    assert told["stopped"] in {end for _, _, end in rows["told"]}
    for cells in rows.values():
        trained = sorted(cell[1:] for cell in cells if cell[0] != "lost")
        assert [start for start, _ in trained] == [0, *(end for _, end in trained[:-1])]
        assert trained[-1][1] == TOTAL
