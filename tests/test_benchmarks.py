"""The benchmarks run, and count rightly; how fast anything is, no test asks."""

import importlib.util
import json
import re
import statistics
import sys
import xml.etree.ElementTree as ET

import pytest
from conftest import ROOT, TORCHRUN, finished, run

BENCHMARKS = ROOT / "benchmarks"
EVERYTHING = pytest.mark.everything


@pytest.fixture
def benchmark(monkeypatch):
    """Import a benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def texts(path):
    """Return all that is written in a picture, which has to be well-formed."""
    return {"".join(element.itertext()).strip() for element in ET.parse(path).getroot().iter()}


@pytest.mark.parametrize(
    "name", ["scaling", "lines", "startup", "breakdown", "communication", "forecast"]
)
def test_help(tmp_path, name):
    job = finished([sys.executable, BENCHMARKS / f"{name}.py", "--help"], tmp_path)
    assert "(default: " in job.stdout


@pytest.mark.parametrize("bad", ["--processes=0", "--epochs=1", "--repeats=x"])
def test_scaling_refuses(tmp_path, bad):
    job = run([sys.executable, BENCHMARKS / "scaling.py", bad], tmp_path)
    assert job.returncode == 2
    assert job.stderr.splitlines()[-1].startswith("scaling.py: error: ")


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


@EVERYTHING
def test_scaling(tmp_path):
    quick = ["--processes=2", "--repeats=1", "--epochs=2", "--width=4", "--batch-size=256"]
    job = finished([sys.executable, BENCHMARKS / "scaling.py", *quick], tmp_path, timeout=300)
    assert job.stdout.count("\n| ") == 6
    record = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
    assert record["machine"]["torch"]
    found = {(r["kind"], r["world_size"], r["batch"]) for r in record["runs"]}
    same = {(kind, size, 256) for kind in ("weak", "copies") for size in (1, 2)}
    assert found == same | {("strong", 1, 512), ("strong", 2, 256)}
    assert all(r["samples_per_second"] > 0 for r in record["runs"])
    assert {"ideal", "weak", "strong", "efficiency"} <= texts(tmp_path / "scaling.svg")
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"scaling.json", "scaling.svg"}


def test_what_is_tried_is_in_the_scripts(benchmark, monkeypatch):
    """A line that is no longer there would stop the whole run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    lines = benchmark("lines")
    for changes in (lines.ANYWHERE | lines.ON_GPUS | lines.BETWEEN_RANKS).values():
        lines.load("05", changes)
    for changes in (lines.ANYWHERE | lines.ON_GPUS).values():
        lines.load("01", changes)
    lines.load("01", lines.TALK)


@EVERYTHING
@pytest.mark.parametrize("ranks", [1, 2])
def test_lines(tmp_path, ranks):
    start = [TORCHRUN, "--standalone", "--nproc-per-node=2"] if ranks == 2 else [sys.executable]
    quick = ["--rounds=1", "--width=4", "--batch-size=1024"]
    job = finished([*start, BENCHMARKS / "lines.py", *quick], tmp_path, timeout=300)
    record = json.loads((tmp_path / f"lines-{ranks}-of-1024.json").read_text(encoding="utf-8"))
    assert record["processes"] == ranks
    compared = {(row["name"], row["against"]) for row in record["ratios"]}
    expected = {("01", "bare loop"), ("a save", "01"), ("AdamW not fused", "01")}
    if ranks == 2:
        expected = {("02", "copies of 01"), ("05", "copies that sum"), ("no vote", "05")}
        expected |= {("evaluation", "copies' evaluation")}
    assert expected <= compared
    assert all(row["median"] > 0 for row in record["ratios"])
    assert job.stdout.count("\n| ") == len(record["ratios"])
    assert {path.name for path in tmp_path.glob("[!.]*")} == {f"lines-{ranks}-of-1024.json"}


@EVERYTHING
def test_startup(tmp_path):
    finished([sys.executable, BENCHMARKS / "startup.py", "--repeats=1"], tmp_path, timeout=300)
    record = json.loads((tmp_path / "startup.json").read_text(encoding="utf-8"))
    assert record["ratio"]["median"] > 0
    assert set(record["seconds"]) == {"03", "shortest"}


@EVERYTHING
def test_breakdown(tmp_path):
    words = [TORCHRUN, "--standalone", "--nproc-per-node=2", BENCHMARKS / "breakdown.py"]
    job = finished([*words, "--width=4"], tmp_path)
    record = json.loads((tmp_path / "breakdown.json").read_text(encoding="utf-8"))
    assert len(record["milliseconds_by_rank"]) == 2
    assert record["gradient_bytes"] == 4 * (4 * 9 + 4 + 8 * 36 + 8 + 16 * 72 + 16 + 10 * 256 + 10)
    for part in record["milliseconds_by_rank"]:
        for name in ("data", "forward", "backward", "waiting", "optimizer", "all-reduce"):
            assert part[name] > 0
        assert 0 <= part["hidden"] <= part["all-reduce"]
    assert "| rank 1 | " in job.stdout
    assert {"rank 0", "rank 1", "waiting", "milliseconds"} <= texts(tmp_path / "breakdown.svg")
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"trace-{rank}.json").read_text(encoding="utf-8"))
        assert any("all_reduce" in event.get("name", "") for event in trace["traceEvents"])


@EVERYTHING
def test_communication_and_forecast(tmp_path):
    launch = [TORCHRUN, "--standalone", "--nproc-per-node=2"]
    finished([*launch, BENCHMARKS / "breakdown.py", "--width=4"], tmp_path)
    for ranks in (2, 3):
        launch = [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}"]
        quick = ["--repeats=1", "--largest=256"]
        job = finished([*launch, BENCHMARKS / "communication.py", *quick], tmp_path)
        assert job.stdout.count("\n| ") == 4 + 1 + 3  # 4 to 256 B, a heading, 16 to 256 B
        path = tmp_path / f"communication-{ranks}.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        assert (record["world_size"], record["backend"]) == (ranks, "gloo")
        assert list(record["all_reduce_seconds"]) == ["4", "16", "64", "256"]
        assert all(t > 0 for row in record["gather_seconds"].values() for t in row.values())
        assert record["connecting_seconds"] > 0
    files = ["communication-2.json", "--held-out=communication-3.json"]
    job = finished([sys.executable, BENCHMARKS / "forecast.py", *files], tmp_path)
    assert "4,096 ranks" in job.stdout
    assert re.search(r"% off in the median; 4 B [+-]\d+%, 16 B ", job.stdout)
    assert re.search(
        r"^\| 4,096 \| [\d.]+ s \| [\d.]+% \| .* s, 4.00 GiB on every rank", job.stdout, re.M
    )
    assert {"ranks", "efficiency", "batch x 8, tree"} <= texts(tmp_path / "forecast.svg")


def test_a_fit_finds_what_made_the_figures(benchmark):
    forecast = benchmark("forecast")
    sizes = [(n, size) for n in (2, 3) for size in (4, 4096, 2**24)]
    measured = [(n, size, forecast.ring(n, size, 5e-5, 1e-9)) for n, size in sizes]
    assert forecast.fit(measured) == pytest.approx((5e-5, 1e-9))


def test_what_was_held_out_is_compared(benchmark):
    """Twice as slow as foretold is -50 %, and twice as fast is +100 %."""
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


@pytest.mark.parametrize("text", ["", "{}", "nothing"])
def test_forecast_refuses(tmp_path, text):
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    job = run([sys.executable, BENCHMARKS / "forecast.py", "bad.json"], tmp_path)
    assert job.returncode == 2
    assert "error: not from communication.py" in job.stderr.splitlines()[-1]


# ---------------------------------------------------------------- the figures in the README

FIGURES = BENCHMARKS / "figures"


def cell(row):
    return "{median:.2f} ({low:.2f}–{high:.2f})".format(**row)  # noqa: RUF001  # a dash for people


def figures(name):
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def test_the_readme_shows_what_was_measured():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [[word.strip() for word in line[1:-1].split("|")] for line in readme.splitlines()]
    limits = {tuple(row[:2]): row[2:] for row in rows if len(row) == 5}
    lines = {row[0]: row[1:] for row in rows if len(row) == 3}
    shown = 0
    for column, name in enumerate(("lines-1-of-32", "lines-2-of-32", "lines-2-of-128")):
        for row in figures(name)["ratios"]:
            if row["name"] == "a save":
                assert 0.0015 < row["median"] < 0.0045  # "0.2 to 0.4 %"
            elif row["against"] == "05" or (row["against"], column) == ("01", 0):
                shown += column == 2 or lines[row["name"]][column] == cell(row)
            else:
                shown += limits[row["name"], row["against"]][column] == cell(row)
    assert shown == sum(
        len(figures(f"lines-{n}")["ratios"]) - 1 for n in ("1-of-32", "2-of-32", "2-of-128")
    )
    start = "{median:.2f}\ntimes ({low:.2f}–{high:.2f})".format(**figures("startup")["ratio"])  # noqa: RUF001
    assert start.replace("\n", " ") in readme.replace("\n", " ")
    assert figures("lines-1-of-32")["machine"]["date"] in readme


def test_the_forecast_in_the_readme(benchmark):
    forecast = benchmark("forecast")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    known = [row for n in (2, 3) for row in forecast.rows_of(figures(f"communication-{n}"))]
    latency, byte = network = forecast.fit(known)
    assert f"({latency * 1e6:.0f} µs, {1e-9 / byte:.1f} GB/s)" in readme
    errors = list(forecast.errors(forecast.rows_of(figures("communication-4")), network).values())
    assert f"{statistics.median(map(abs, errors)):.0%}".replace("%", " %") in readme
    assert f"and {-errors[-1]:.0%}".replace("%", " %") in readme
    gathered = figures("communication-2")["gather_seconds"]["1048576"]
    for way in ("all_reduce", "gather_object", "all_gather_object"):
        assert f"{way} {gathered[way] * 1e3:.1f} ms" in readme


def test_the_scaling_in_the_readme(benchmark):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert benchmark("scaling").table(figures("scaling")["summary"]) in readme
