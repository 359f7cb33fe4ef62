"""The benchmarks run and count correctly, and the page shows what was measured.

No test asks how fast anything is.
"""

import importlib
import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from support.jobs import finished
from support.scripts import ROOT

BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"
NAMES = (
    "all",
    "breakdown",
    "communication",
    "forecast",
    "learning_rate",
    "lines",
    "scaling",
    "startup",
)
EVERYTHING = pytest.mark.everything


@pytest.fixture
def benchmark(monkeypatch):
    """Import a benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def refused(benchmark, monkeypatch, capsys):
    """Give a benchmark arguments, which it must refuse; return its last line."""

    def parse(name, *words, code=2):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as end:
            benchmark(name).parse_args()
        assert end.value.code == code
        output = capsys.readouterr()
        return output.err.splitlines()[-1] if code else output.out

    return parse


@pytest.mark.parametrize("name", NAMES)
def test_help(refused, name):
    assert f"usage: {name}.py" in refused(name, "--help", code=0)


@pytest.mark.parametrize("bad", ["--processes=0", "--epochs=1", "--repeats=x"])
def test_scaling_refuses(refused, bad):
    assert refused("scaling", bad).startswith("scaling.py: error: ")


@pytest.mark.parametrize("text", ["", "{}", "nothing"])
def test_forecast_refuses(refused, tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    assert "error: not from communication.py" in refused("forecast", str(path))


@pytest.mark.parametrize("name", ["breakdown", "communication"])
def test_torchrun_is_asked_for(refused, monkeypatch, name):
    monkeypatch.delenv("RANK", raising=False)
    assert "error: start it with: torchrun " in refused(name)


def test_ratios_are_taken_within_a_repetition(benchmark):
    """The second time the machine was ten times as fast: no ratio may notice."""
    speeds = {("weak", 1): 100, ("weak", 4): 300, ("copies", 1): 100, ("copies", 4): 400}
    runs = []
    for repetition, factor in enumerate((1, 10)):
        for (kind, size), speed in speeds.items():
            run = {"kind": kind, "world_size": size, "batch": 32, "repetition": repetition}
            runs.append({**run, "samples_per_second": factor * speed})
    rows = {(row["kind"], row["world_size"]): row for row in benchmark("scaling").summary(runs)}
    ratio = {"low": 3, "median": 3, "high": 3}
    assert rows["weak", 4]["speed_up"] == ratio
    assert rows["weak", 4]["efficiency"] == dict.fromkeys(ratio, 0.75)
    assert rows["weak", 4]["of_copies"] == dict.fromkeys(ratio, 0.75)
    assert rows["copies", 4]["speed_up"] == dict.fromkeys(ratio, 4)


def test_the_changed_lines_are_in_the_scripts(benchmark):
    """load() ends the program if a script no longer has the text that it is to replace."""
    lines, load = benchmark("lines"), benchmark("shared").load
    for changes in (lines.ANYWHERE | lines.ON_GPUS | lines.BETWEEN_RANKS).values():
        load("05", changes)
    for changes in [*(lines.ANYWHERE | lines.ON_GPUS).values(), lines.SUMMING]:
        load("01", changes)
    with pytest.raises(SystemExit, match="has no 'no such line'"):
        load("01", [("no such line", "")])


def test_each_rule_changes_the_rate(benchmark):
    """At step 0 of four ranks with 128 samples each: twice the batch for which it was chosen."""
    rates = {}
    for rule in benchmark("learning_rate").RULES:
        recipe = benchmark("learning_rate").recipe(rule)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        recipe.build_scheduler(optimizer, batch=512, steps=100)
        rates[rule] = recipe.WARM_UP * optimizer.param_groups[0]["lr"]
    assert rates == pytest.approx({"same rate": 1, "square root": 2**0.5, "linear": 2})


def test_a_fit_finds_what_made_the_figures(benchmark):
    forecast = benchmark("forecast")
    sizes = [(n, size) for n in (2, 3) for size in (4, 4096, 2**24)]
    measured = [(n, size, forecast.ring(n, size, 5e-5, 1e-9)) for n, size in sizes]
    assert forecast.fit(measured) == pytest.approx((5e-5, 1e-9))


def test_the_held_out_world_is_compared(benchmark):
    """Twice as slow as forecast is -50 %, and twice as fast is +100 %."""
    forecast = benchmark("forecast")
    network = (1e-4, 1e-9)
    measured = [(4, n, f * forecast.ring(4, n, *network)) for n, f in ((4, 2), (64, 0.5), (256, 1))]
    assert forecast.errors(measured, network) == pytest.approx({4: -0.5, 64: 1, 256: 0})


def test_the_forecast_by_hand(benchmark):
    forecast = benchmark("forecast")
    assert forecast.ring(4, 1000, 1, 0.01) == 6 * (1 + 250 * 0.01)
    assert forecast.tree(5, 1000, 1, 0.01) == 2 * 3 + 2 * 1000 * 0.01
    assert forecast.waiting(1.0, backward=5.0, buckets=1) == 1.0  # begins when backward ends
    assert forecast.waiting(1.0, backward=5.0, buckets=4) == 0.25  # only the last is not hidden
    assert forecast.waiting(8.0, backward=4.0, buckets=4) == 5.0  # more than backward can hide
    step = {"seconds": 1.0, "backward": 0.5, "bytes": 1000, "buckets": 1}
    assert forecast.efficiency(1, step, forecast.ring, (1, 1)) == 1
    assert forecast.efficiency(2, step, forecast.ring, (0.5, 0)) == 0.5
    shares = [forecast.efficiency(n, step, forecast.ring, (1e-3, 1e-6)) for n in forecast.WORLDS]
    assert shares == sorted(shares, reverse=True)


# ---------------------------------------------------------------- the page


def rows(text):
    """Return the lines of a page's tables, by their first cells."""
    return {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}


def test_the_page_shows_what_was_measured(benchmark):
    everything, page = benchmark("all"), PAGE.read_text(encoding="utf-8")
    assert page == everything.filled(page, everything.FIGURES)
    assert re.findall(r"<!-- measured: (\w+) -->", page) == list(everything.TABLES)
    shown = {BENCHMARKS / path for path in re.findall(r"\((figures/\S+\.svg)\)", page)}
    assert shown == set(everything.FIGURES.glob("*.svg"))


def test_the_top_page_quotes_this_one(benchmark):
    everything = benchmark("all")
    measured = rows(everything.short(everything.FIGURES))
    quoted = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    for name in measured.keys() & quoted.keys():
        assert quoted[name] == measured[name]


# ---------------------------------------------------------------- everything, in its smallest size


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The folder and the output of all benchmarks, each run once."""
    folder = tmp_path_factory.mktemp("figures")
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    start = [sys.executable, BENCHMARKS / "all.py", "--quick"]
    job = finished(start, folder, compiled, timeout=1200)
    return folder, job.stdout


def record(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def texts(path):
    """Return all text in a picture, which has to be well-formed."""
    return {"".join(element.itertext()).strip() for element in ET.parse(path).getroot().iter()}


@EVERYTHING
def test_the_same_files_as_for_the_page(tried):
    folder, output = tried
    measured = {path.name for path in folder.glob("[!.t]*")}  # without the traces
    assert measured == {path.name for path in (BENCHMARKS / "figures").iterdir()}
    assert output.count("\n## ") == PAGE.read_text(encoding="utf-8").count("\n## ")
    for path in folder.glob("*.json"):
        assert path.name.startswith("trace") or record(folder, path.stem)["machine"]["torch"]


@EVERYTHING
def test_scaling(tried):
    folder, _ = tried
    found = {(r["kind"], r["world_size"], r["batch"]) for r in record(folder, "scaling")["runs"]}
    same = {(kind, size, 128) for kind in ("weak", "copies") for size in (1, 2)}
    assert found == same | {("strong", 1, 256), ("strong", 2, 128)}
    assert all(r["samples_per_second"] > 0 for r in record(folder, "scaling")["runs"])
    assert {"ideal", "weak", "strong", "efficiency"} <= texts(folder / "scaling.svg")


@EVERYTHING
def test_learning_rate(tried):
    folder, _ = tried
    found = record(folder, "learning_rate")
    runs = {(r["rule"], r["processes"], r["seed"], r["total"]) for r in found["runs"]}
    rules = ("same rate", "square root", "linear")
    assert runs == {(rule, size, 0, 359) for rule in rules for size in (1, 2)}
    # Two processes have the batch for which the rate was chosen: no rule changes anything.
    assert len({r["correct"] for r in found["runs"] if r["processes"] == 2}) == 1
    assert {*rules, "processes"} <= texts(folder / "learning_rate.svg")


@EVERYTHING
@pytest.mark.parametrize("ranks", [1, 2])
def test_lines(tried, ranks):
    found = record(tried[0], f"lines-{ranks}-of-128")
    assert found["processes"] == ranks
    compared = {(row["name"], row["against"]) for row in found["ratios"]}
    if ranks == 1:
        expected = {("01", "bare loop"), ("a save", "01"), ("AdamW not fused", "01")}
    else:
        expected = {("02", "copies of 01"), ("04", "copies that sum"), ("no vote", "05")}
        expected |= {("02", "01 with as many threads"), ("a save", "05")}
        expected |= {("evaluation by 05", "evaluation by copies of 01")}
    expected |= {("torch.compile", "01" if ranks == 1 else "05")}
    assert expected <= compared
    assert all(row["median"] > 0 for row in found["ratios"])


@EVERYTHING
def test_startup(tried):
    found = record(tried[0], "startup")
    assert found["ratio"]["median"] > 0
    assert set(found["seconds"]) == {"03", "shortest"}


@EVERYTHING
def test_breakdown(tried):
    folder, output = tried
    found = record(folder, "breakdown")
    assert len(found["milliseconds_by_rank"]) == 2
    assert found["gradient_bytes"] == 4 * (4 * 9 + 4 + 8 * 36 + 8 + 16 * 72 + 16 + 10 * 256 + 10)
    for part in found["milliseconds_by_rank"]:
        for name in ("data", "forward", "backward", "waiting", "optimizer", "all-reduce"):
            assert part[name] > 0
        assert 0 <= part["hidden"] <= part["all-reduce"]
    assert "| rank 1 | " in output
    assert {"rank 0", "rank 1", "waiting", "milliseconds"} <= texts(folder / "breakdown.svg")
    for rank in (0, 1):
        assert any(
            "all_reduce" in e.get("name", "")
            for e in record(folder, f"trace-{rank}")["traceEvents"]
        )


@EVERYTHING
def test_communication_and_forecast(tried):
    folder, output = tried
    for ranks in (2, 3, 4):
        found = record(folder, f"communication-{ranks}")
        assert (found["world_size"], found["backend"]) == (ranks, "gloo")
        assert list(found["all_reduce_seconds"]) == ["4", "16", "64", "256"]
        assert all(t > 0 for row in found["gather_seconds"].values() for t in row.values())
        assert found["connecting_seconds"] > 0
    assert "4,096 ranks" in output
    assert re.search(r"% in the median; 4 B [+-]\d+%, 16 B ", output)
    growth = r"^\| 4,096 \| [\d.]+ s \| [\d.]+% \| .* s, 4.00 GiB on every rank"
    assert re.search(growth, output, re.MULTILINE)
    assert {"ranks", "efficiency", "batch x 8, tree"} <= texts(folder / "forecast.svg")
