"""The benchmarks run and count correctly, and the page shows what was measured.

No test checks how fast anything is.
"""

import importlib
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from support.jobs import finished
from support.scripts import ROOT, forked

BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"shared", "timeline"})
FAST = {"CXX": "none"}  # no compiler, so torch.compile is not tried


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def refused(benchmark, monkeypatch, capsys):
    """Return a function that parses arguments that end the program, and returns its output."""

    def parse(name, *words, code=2):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as end:
            benchmark(name).parse_args()
        assert end.value.code == code
        return "".join(capsys.readouterr())

    return parse


@pytest.mark.parametrize("name", NAMES)
def test_it_says_how_it_is_used(refused, name):
    assert f"usage: {name}.py" in refused(name, "--help", code=0)


def test_it_refuses_what_it_cannot_measure(refused, monkeypatch):
    for bad in ("--processes=0", "--epochs=1", "--repeats=x"):
        assert "scaling.py: error: " in refused("scaling", bad)
    monkeypatch.delenv("RANK", raising=False)
    for name in ("breakdown", "communication"):
        wanted = f"start it with: torchrun --standalone --nproc-per-node=2 {name}.py"
        assert wanted in refused(name)


# ---------------------------------------------------------------- what is computed


def test_ratios_are_taken_within_a_repetition(benchmark):
    """The second time, the machine was ten times as fast, which must not change any ratio."""
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
    """load() ends the program unless the text to replace occurs exactly once."""
    lines, load = benchmark("lines"), benchmark("shared").load
    for changes in (lines.ANYWHERE | lines.ON_GPUS | lines.BETWEEN_RANKS).values():
        load("05", changes)
    for changes in (lines.ANYWHERE | lines.ON_GPUS).values():
        load("01", changes)
    with pytest.raises(SystemExit, match="'no such line' is 0 times in 01"):
        load("01", [("no such line", "")])


def test_each_rule_changes_the_rate(benchmark):
    """Step 0 of four ranks with 128 samples each: twice the batch that the rate was chosen for."""
    rates = {}
    for rule in benchmark("learning_rate").RULES:
        recipe = benchmark("learning_rate").recipe(rule)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        recipe.build_scheduler(optimizer, batch=512, steps=100)
        rates[rule] = recipe.WARM_UP * optimizer.param_groups[0]["lr"]
    assert rates == pytest.approx({"same rate": 1, "square root": 2**0.5, "linear": 2})


def test_a_fit_finds_what_made_the_figures(benchmark):
    timeline = benchmark("timeline")
    times = {n: {s: timeline.ring(n, s, 5e-5, 1e-9) for s in (4, 4096, 2**24)} for n in (2, 3)}
    records = [{"world_size": n, "all_reduce_seconds": found} for n, found in times.items()]
    assert timeline.fit(records) == pytest.approx((5e-5, 1e-9))


# ---------------------------------------------------------------- the page


@pytest.fixture
def all_of_it(benchmark, monkeypatch, tmp_path):
    """The module all.py with a copy of the figures, and a page with empty tables."""
    module = benchmark("all")
    shutil.copytree(module.FIGURES, tmp_path / "figures")
    empty = re.sub(r"(<!-- measured: .*\n)[^<]*", r"\1", module.PAGE.read_text(encoding="utf-8"))
    (tmp_path / "README.md").write_text(empty, encoding="utf-8")
    monkeypatch.setattr(module, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(module, "PAGE", tmp_path / "README.md")
    monkeypatch.setattr(module, "DATA", tmp_path / "figure.json")
    return module


def test_the_page_shows_what_was_measured(all_of_it, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["all.py", "--tables"])
    all_of_it.main()
    page = PAGE.read_text(encoding="utf-8")
    assert all_of_it.PAGE.read_text(encoding="utf-8") == page
    assert {*re.findall(r"<!-- measured: (\w+) -->", page)} == {*all_of_it.TABLES}
    shown = set(re.findall(r"\(figures/(\S+\.svg)\)", page))
    assert shown == {path.name for path in all_of_it.FIGURES.glob("*.svg")}
    drawn = ROOT / "diffs" / "figures" / "where-the-time-goes.json"
    assert all_of_it.DATA.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


SMALL = {
    "lines": "--seconds=1 --width=1",
    "breakdown": "--width=4",
    "communication": "--repeats=1 --largest=256",
    "scaling": "--repeats=1 --epochs=2 --processes=1 --width=1",
    "learning_rate": "--seeds=1 --epochs=1 --processes=2 --width=4",
}


@pytest.mark.weekly("every command of all.py with torchrun, with torch.compile: minutes")
def test_all_of_it_is_measured_anew(all_of_it, monkeypatch):
    commands = [(n, f"{c} {SMALL[c.partition('.py')[0]]}") for n, c in all_of_it.COMMANDS]
    files = {path.name for path in all_of_it.FIGURES.iterdir()}
    shutil.rmtree(all_of_it.FIGURES)
    all_of_it.FIGURES.mkdir()
    monkeypatch.setattr(all_of_it, "COMMANDS", commands)
    monkeypatch.setattr(sys, "argv", ["all.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    all_of_it.main()
    assert {path.name for path in all_of_it.FIGURES.iterdir()} == files
    headings = re.findall(r"^\|.*\|\n\| ---", PAGE.read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"^\|.*\|\n\| ---", all_of_it.PAGE.read_text("utf-8"), re.M) == headings


# ---------------------------------------------------------------- what is measured


def measured(name, cwd, *words, nprocs=0):
    """Run a benchmark in a small setting on forked ranks; return what it wrote."""
    words = [*words, *SMALL[name].split()]
    finished(forked(BENCHMARKS / f"{name}.py", *words, nprocs=nprocs), cwd, FAST)
    (path,) = cwd.glob(f"{name}*.json") if name != "breakdown" else cwd.glob("timeline-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_lines(tmp_path):
    found = measured("lines", tmp_path, nprocs=2)
    compared = {(row["name"], row["against"]) for row in found["ratios"]}
    assert {("02", "01 with as many threads"), ("02", "copies of 01"), ("a save", "05")} < compared
    assert {("no vote", "05"), ("evaluation by 05", "evaluation by copies of 01")} < compared
    assert all(row["median"] > 0 for row in found["ratios"])
    assert (found["processes"], found["options"]["batch_size"]) == (2, 128)


def test_breakdown(tmp_path):
    """Gradients of 4 kB or more each fill a bucket; smaller ones share one."""
    found = measured("breakdown", tmp_path, "--bucket-mb=0.004", "--batch-size=8", nprocs=2)
    sizes = found["bucket_bytes"]
    assert len(sizes) > 1
    assert sum(sizes) == 4 * (4 * 9 + 4 + 8 * 36 + 8 + 16 * 72 + 16 + 10 * 256 + 10)
    for rank, means in zip(found["ranks"], found["milliseconds_by_rank"], strict=True):
        names = ("data", "forward", "backward", "waiting", "optimizer")
        moments = [moment for name in names for span in rank[name] for moment in span]
        assert moments == sorted(moments)
        for (ready, _), (start, end) in zip(rank["ready"], rank["all-reduce"], strict=True):
            assert rank["forward"][0][1] < ready <= start < end <= rank["optimizer"][0][0]
        assert all(means[name] > 0 for name in (*names, "all-reduce"))
        assert 0 <= means["hidden"] <= means["all-reduce"]
    changed = [(row["batch"], row["passes"], row["no_sync"]) for row in found["measured"]]
    assert changed == [(4, 1, True), (1, 4, True), (1, 4, False)]
    texts = {"".join(e.itertext()).strip() for e in ET.parse(tmp_path / "timeline-2.svg").iter()}
    assert {"rank 0", "rank 1", "waiting", "milliseconds"} <= texts
    events = json.loads((tmp_path / "trace-1.json").read_text("utf-8"))["traceEvents"]
    assert any("all_reduce" in event.get("name", "") for event in events)


def test_communication(tmp_path):
    found = measured("communication", tmp_path, nprocs=2)
    assert (found["world_size"], found["backend"]) == (2, "gloo")
    assert list(found["all_reduce_seconds"]) == ["4", "16", "64", "256"]
    assert all(t > 0 for row in found["gather_seconds"].values() for t in row.values())


def test_scaling(tmp_path):
    runs = measured("scaling", tmp_path)["runs"]
    found = {(run["kind"], run["world_size"], run["batch"]) for run in runs}
    assert found == {("weak", 1, 128), ("strong", 1, 128), ("copies", 1, 128)}
    assert all(run["samples_per_second"] > 0 for run in runs)


def test_learning_rate(tmp_path):
    found = measured("learning_rate", tmp_path)["runs"]
    runs = {(run["rule"], run["processes"], run["seed"], run["total"]) for run in found}
    rules = ("same rate", "square root", "linear")
    assert runs == {(rule, size, 0, 359) for rule in rules for size in (1, 2)}
    # The rate was chosen for the batch of two processes, so no rule changes it.
    assert len({run["correct"] for run in found if run["processes"] == 2}) == 1
