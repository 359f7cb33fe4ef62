"""The benchmarks run and count correctly, and the page shows what was measured.

No test checks how fast anything is.
"""

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from support import server
from support.jobs import finished
from support.once import once
from support.scripts import ROOT

BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"
FORKING = ROOT / "benchmarks" / "tests" / "forking.py"
NAMES = (
    "all",
    "breakdown",
    "collectives",
    "communication",
    "forecast",
    "learning_rate",
    "lines",
    "scaling",
    "startup",
    "timeline",
    "which",
)
SLOW = pytest.mark.slow


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def refused(benchmark, monkeypatch, capsys):
    """Return a function that checks that arguments are refused, and returns the last line."""

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


@pytest.mark.parametrize("program", ["communication.py", "breakdown.py"])
@pytest.mark.parametrize("text", [None, "", "{}", "[]", "nothing"])
def test_forecast_refuses(benchmark, monkeypatch, tmp_path, program, text):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    good = str(BENCHMARKS / "figures" / "communication-2.json")
    words = [good, f"--breakdown={path}"] if program == "breakdown.py" else [str(path)]
    monkeypatch.setattr(sys, "argv", ["forecast.py", *words])
    with pytest.raises(SystemExit, match=f"bad.json is not from {program}: "):
        benchmark("forecast").main()


@pytest.mark.parametrize("words", [[], ["--parameters=0"], ["--parameters=3e9", "--network=inf"]])
def test_forecast_refuses_options(refused, words):
    assert refused("forecast", *words).startswith("forecast.py: error: ")


@pytest.mark.parametrize("name", ["breakdown", "communication", "timeline"])
def test_torchrun_is_asked_for(refused, monkeypatch, name):
    monkeypatch.delenv("RANK", raising=False)
    assert "error: start it with: torchrun " in refused(name)


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
    for changes in [*(lines.ANYWHERE | lines.ON_GPUS).values(), lines.SUMMING]:
        load("01", changes)
    with pytest.raises(SystemExit, match="'no such line' is 0 times in 01"):
        load("01", [("no such line", "")])
    with pytest.raises(SystemExit, match=r"'self' is \d+ times in 01"):
        load("01", [("self", "")])


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
    assert forecast.waiting(1.0, backward=5.0, buckets=1) == 1.0  # starts when backward ends
    assert forecast.waiting(1.0, backward=5.0, buckets=4) == 0.25  # all but the last are hidden
    assert forecast.waiting(8.0, backward=4.0, buckets=4) == 5.0  # more than backward can hide
    step = forecast.Step(seconds=1.0, backward=0.5, size=1000, buckets=1, batch=128)
    assert forecast.efficiency(1, step, forecast.ring, (1, 1)) == 1
    assert forecast.efficiency(2, step, forecast.ring, (0.5, 0)) == 0.5
    shares = [forecast.efficiency(n, step, forecast.ring, (1e-3, 1e-6)) for n in forecast.WORLDS]
    assert shares == sorted(shares, reverse=True)


def test_a_step_by_hand(benchmark):
    """Computing takes 0.06 s; FSDP2 sends 8e9 bytes times 3/4; DDP the same behind two thirds."""
    forecast = benchmark("forecast")
    job = benchmark("which").Job(1e9, 10, 1000, nodes=1, gpus=4, tokens=1000)
    fast, slow = (forecast.Speed(1e14, inside, network=1, latency=0) for inside in (1e12, 1e10))
    assert forecast.step_seconds("fsdp2_gpt", job, fast) == pytest.approx(0.06 + 0.006 / 10)
    waiting = {"ddp": 0.6 - 0.04 * (1 - 1 / 153), "fsdp2_gpt": 0.6 - 0.06 * 0.9}  # 153 buckets
    for way, seconds in waiting.items():
        assert forecast.step_seconds(way, job, slow) == pytest.approx(0.06 + seconds)


def test_a_measured_network_counts_more_than_a_stated_one(benchmark):
    forecast = benchmark("forecast")
    args = argparse.Namespace(tflops=1, inside=2, network=3, latency=4)
    assert forecast.speed_of(args, []) == forecast.Speed(1e12, 2e9, 3e9, 4e-6)
    files = [BENCHMARKS / "figures" / f"communication-{ranks}.json" for ranks in (2, 3)]
    records = [forecast.read_communication(path) for path in files]
    latency, byte = forecast.fitted(records)
    assert forecast.speed_of(args, records) == forecast.Speed(1e12, 2e9, 1 / byte, latency)


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


@pytest.mark.parametrize("network", [[], ["--network=200"]])
def test_the_steps_of_a_gpt_are_computed(benchmark, monkeypatch, capsys, network):
    monkeypatch.setattr(sys, "argv", ["forecast.py", "--parameters=3e9", *network])
    benchmark("forecast").main()
    first, _, second = PAGE.read_text(encoding="utf-8").partition("`--network 200`")
    assert f"\n\n{capsys.readouterr().out}\n" in (second if network else first)


def test_the_page_shows_what_was_measured(all_of_it, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["all.py", "--tables"])
    all_of_it.main()
    page = PAGE.read_text(encoding="utf-8")
    assert all_of_it.PAGE.read_text(encoding="utf-8") == page
    assert re.findall(r"<!-- measured: (\w+) -->", page) == list(all_of_it.TABLES)
    shown = set(re.findall(r"\(figures/(\S+\.svg)\)", page))
    assert shown == {path.name for path in all_of_it.FIGURES.glob("*.svg")}
    drawn = ROOT / "diffs" / "figures" / "where-the-time-goes.json"
    assert all_of_it.DATA.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


@SLOW
def test_all_measures_and_writes_the_page(all_of_it, monkeypatch):
    """With one command instead of all, started by torchrun; then with one that fails."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["all.py"])
    monkeypatch.setattr(all_of_it, "COMMANDS", [(2, f"communication.py {QUICK['communication']}")])
    trace = all_of_it.FIGURES / "trace-0.json"
    trace.touch()
    all_of_it.main()
    assert "| 2 ranks: gather_object, 256 B per rank | " in all_of_it.PAGE.read_text("utf-8")
    assert not trace.exists()
    monkeypatch.setattr(all_of_it, "COMMANDS", [(None, "scaling.py --epochs=1")])
    with pytest.raises(subprocess.CalledProcessError):
        all_of_it.main()


# --------------------------------------------------------------- each command in its smallest size

QUICK = {
    "lines": "--seconds=1 --width=1",
    "startup": "--repeats=1 --processes=1",
    "breakdown": "--width=4",
    "timeline": "--width=4 --bucket-mb=0.004",
    "communication": "--repeats=1 --largest=256",
    "forecast": "",
    "scaling": "--repeats=1 --epochs=2 --processes=2 --width=1",
    "learning_rate": "--seeds=1 --epochs=1 --processes=2 --width=4",
}


@pytest.fixture
def tried(benchmark):
    """Return a function that runs a benchmark in its smallest size, once for all tests.

    The ranks are forked. The number selects one of the commands of all.py that run the benchmark.
    """

    def trial(name, number=0):
        own = [row for row in benchmark("all").COMMANDS if row[1].startswith(f"{name}.py")]
        ranks, command = own[number]
        _, *words = [*command.split(), *QUICK[name].split()]
        program = BENCHMARKS / f"{name}.py"
        if ranks:
            start = server.command(program, *words, nprocs=ranks)
        else:
            start = server.command(FORKING, program, *words)
        before = before_a_forecast() if name == "forecast" else []

        def make(cwd):
            for result in before:
                copy_files(result, cwd)
            compiled = {
                "TORCHINDUCTOR_CACHE_DIR": str(cwd.parent / "compiled"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # avoids a pool of processes
                "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # its code fits what its writer saw of the CPU
            }
            return finished(start, cwd, compiled, timeout=600)

        return once(("benchmark", name, number), make)

    def before_a_forecast():
        return [trial("breakdown"), *(trial("communication", number) for number in range(3))]

    return trial


def copy_files(result, folder):
    """Copy what a benchmark wrote, without the traces."""
    for path in {*result.cwd.glob("[!.]*")} - {*result.cwd.glob("trace-*")}:
        shutil.copy(path, folder)


def record(result, name):
    return json.loads((result.cwd / f"{name}.json").read_text(encoding="utf-8"))


def texts(path):
    """Return all text in a picture, which must be well-formed XML."""
    return {"".join(element.itertext()).strip() for element in ET.parse(path).getroot().iter()}


@pytest.mark.weekly  # needs all of the runs below
def test_the_same_files_as_for_the_page(benchmark, tried, tmp_path):
    names = [command.partition(".py")[0] for _, command in benchmark("all").COMMANDS]
    for name in set(names):
        for number in range(names.count(name)):
            copy_files(tried(name, number), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (BENCHMARKS / "figures").iterdir()
    }
    page = PAGE.read_text(encoding="utf-8")
    filled = benchmark("all").filled(page, tmp_path)
    assert filled != page
    assert re.findall("^## .*", filled, re.MULTILINE) == re.findall("^## .*", page, re.MULTILINE)
    for path in tmp_path.glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["machine"]["torch"]


@SLOW
def test_scaling(tried):
    result = tried("scaling")
    runs = record(result, "scaling")["runs"]
    found = {(run["kind"], run["world_size"], run["batch"]) for run in runs}
    same = {(kind, size, 128) for kind in ("weak", "copies") for size in (1, 2)}
    assert found == same | {("strong", 1, 256), ("strong", 2, 128)}
    assert all(run["samples_per_second"] > 0 for run in runs)
    assert {"ideal", "weak", "strong", "efficiency"} <= texts(result.cwd / "scaling.svg")


@SLOW
def test_learning_rate(tried):
    result = tried("learning_rate")
    found = record(result, "learning_rate")["runs"]
    runs = {(run["rule"], run["processes"], run["seed"], run["total"]) for run in found}
    rules = ("same rate", "square root", "linear")
    assert runs == {(rule, size, 0, 359) for rule in rules for size in (1, 2)}
    # The rate was chosen for the batch of two processes, so no rule changes it.
    assert len({run["correct"] for run in found if run["processes"] == 2}) == 1
    assert {*rules, "processes"} <= texts(result.cwd / "learning_rate.svg")


@pytest.mark.weekly
@pytest.mark.parametrize("number, ranks, batch", [(0, 1, 128), (1, 2, 128), (2, 2, 32)])
def test_lines(tried, number, ranks, batch):
    found = record(tried("lines", number), f"lines-{ranks}-of-{batch}")
    assert found["processes"] == ranks
    compared = {(row["name"], row["against"]) for row in found["ratios"]}
    step = "01" if ranks == 1 else "05"
    variants = {(name, step) for name in ("a save", "AdamW not fused", "torch.compile")}
    if ranks == 1:
        assert {*variants, ("01", "bare loop")} <= compared
    else:
        copies = ("copies of 01", "copies that sum")
        baselines = {(name, other) for name in ("02", "04") for other in copies}
        baselines |= {("02", "01 with as many threads"), copies[::-1]}
        variants |= {("no vote", "05"), ("evaluation by 05", "evaluation by copies of 01")}
        assert baselines <= compared
        assert compared == baselines if batch == 32 else variants <= compared
    assert all(row["median"] > 0 for row in found["ratios"])


@SLOW
def test_startup(tried):
    found = record(tried("startup"), "startup")
    assert found["ratio"]["median"] > 0
    assert set(found["seconds"]) == {"03", "shortest"}


@SLOW
def test_breakdown(tried):
    result = tried("breakdown")
    found = record(result, "breakdown")
    assert len(found["milliseconds_by_rank"]) == 2
    assert found["gradient_bytes"] == 4 * (4 * 9 + 4 + 8 * 36 + 8 + 16 * 72 + 16 + 10 * 256 + 10)
    for part in found["milliseconds_by_rank"]:
        for name in ("data", "forward", "backward", "waiting", "optimizer", "all-reduce"):
            assert part[name] > 0
        assert 0 <= part["hidden"] <= part["all-reduce"]
    assert "| rank 1 | " in result.stdout
    assert {"rank 0", "rank 1", "waiting", "milliseconds"} <= texts(result.cwd / "breakdown.svg")
    for rank in (0, 1):
        events = record(result, f"trace-{rank}")["traceEvents"]
        assert any("all_reduce" in event.get("name", "") for event in events)


@SLOW
def test_timeline(tried):
    """Gradients of 4 kB or more each fill a bucket; smaller ones share one."""
    result = tried("timeline")
    found = record(result, "timeline-2")
    sizes = found["bucket_bytes"]
    assert len(sizes) > 1
    assert sum(sizes) == 4 * (4 * 9 + 4 + 8 * 36 + 8 + 16 * 72 + 16 + 10 * 256 + 10)
    for rank in found["ranks"]:
        names = ("data", "forward", "backward", "waiting", "optimizer")
        moments = [moment for name in names for span in rank[name] for moment in span]
        assert moments == sorted(moments)
        assert len(rank["ready"]) == len(rank["all-reduce"]) == len(sizes)
        for (ready, _), (start, end) in zip(rank["ready"], rank["all-reduce"], strict=True):
            assert rank["forward"][0][1] < ready <= start < end <= rank["optimizer"][0][0]
    changed = [(row["batch"], row["passes"], row["no_sync"]) for row in found["measured"]]
    assert changed == [(4, 1, True), (1, 4, True), (1, 4, False)]
    assert all(row["milliseconds"] > 0 for row in found["measured"])
    assert {"rank 0", "rank 1", "waiting", "milliseconds"} <= texts(result.cwd / "timeline-2.svg")


@SLOW
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.weekly) for n in (3, 4))]
)
def test_communication(tried, ranks):
    found = record(tried("communication", ranks - 2), f"communication-{ranks}")
    assert (found["world_size"], found["backend"]) == (ranks, "gloo")
    assert list(found["all_reduce_seconds"]) == ["4", "16", "64", "256"]
    assert all(t > 0 for row in found["gather_seconds"].values() for t in row.values())
    assert found["connecting_seconds"] > 0


@SLOW
def test_forecast(tried):
    result = tried("forecast")
    assert "4,096 ranks" in result.stdout
    assert re.search(r"% in the median; 4 B [+-]\d+%, 16 B ", result.stdout)
    growth = r"^\| 4,096 \| [\d.]+ s \| [\d.]+% \| .* s, 4.00 GiB on every rank"
    assert re.search(growth, result.stdout, re.MULTILINE)
    assert {"ranks", "efficiency", "batch x 8, tree"} <= texts(result.cwd / "forecast.svg")
