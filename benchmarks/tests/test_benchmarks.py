"""The benchmarks run and count correctly; no test checks how fast anything is."""

import importlib
import json
import re
import shutil
import sys

import pytest
from support.jobs import finished
from support.scripts import ROOT, forked
from torch.autograd.profiler_util import DeviceType, FunctionEvent

BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"
SMALL = {
    "peers": "--repeats=1 --epochs=2 --width=2",
    "lines": "--repeats=1 --epochs=2 --width=1",
    "breakdown": "--width=4",
    "by_hand": "--width=8 --rounds=1 --steps=1 --profiled=3",
    "scaling": "--repeats=1 --epochs=2 --processes=1 --width=1",
    "learning_rate": "--seeds=1 --epochs=1 --processes=2 --width=4",
}


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_ratios_are_taken_within_a_round(benchmark):
    """The speed of the machine drifts a hundredfold, which must not change any ratio."""
    shared, speeds = benchmark("shared"), {"one": [100, 1000, 10], "four": [200, 3000, 40]}
    found = shared.rounds({name: iter(own).__next__ for name, own in speeds.items()}, 3)
    assert shared.relative(found["four"], found["one"]) == {"low": 2.5, "median": 3, "high": 3.5}


def test_the_changed_lines_are_in_the_scripts(benchmark):
    """changed() ends the program unless the text to replace occurs exactly once."""
    changed, learning = benchmark("shared").changed, benchmark("learning_rate")
    for changes in benchmark("lines").CHANGES.values():
        compile(changed("05", changes), "05", "exec")
    changed("learning_rate", [(learning.ROOT_RULE, learning.RULES["linear"])])


def test_what_the_trace_of_a_gpu_repeats_is_no_second_step(benchmark):
    breakdown, name, gpu = benchmark("breakdown"), "Optimizer.step#AdamW.step", DeviceType.CUDA
    events = [  # the host's range is on the GPU's time axis, too; there, only kernels count
        FunctionEvent(0, name, 0, 10, 15, is_user_annotation=True),
        FunctionEvent(0, name, 0, 90, 98, device_type=gpu, is_user_annotation=True),
        FunctionEvent(0, "sgemm", 0, 90, 94, device_type=gpu),
        FunctionEvent(0, "ncclDevKernel_AllReduce_Sum_f32", 0, 92, 98, device_type=gpu),
    ]
    assert breakdown.spans(events, 1, "Optimizer.step") == [(1.01, 1.015)]
    assert breakdown.of_gpu(events, 2) == {"GPU": 0.002, "NCCL": 0.003}


@pytest.fixture
def all_of_it(benchmark, monkeypatch, tmp_path):
    """The module all.py with a copy of the figures and of the page."""
    module = benchmark("all")
    shutil.copytree(module.FIGURES, tmp_path / "figures")
    shutil.copy(PAGE, tmp_path)
    for name, path in (("FIGURES", "figures"), ("PAGE", "README.md"), ("DATA", "figure.json")):
        monkeypatch.setattr(module, name, tmp_path / path)
    return module


def test_the_page_shows_what_was_measured(all_of_it, monkeypatch):
    page = PAGE.read_text(encoding="utf-8")
    empty = re.sub(r"(<!-- measured: .*\n)[^<]*", r"\1", page)
    all_of_it.PAGE.write_text(empty, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["all.py", "--tables"])
    all_of_it.main()
    assert all_of_it.PAGE.read_text(encoding="utf-8") == page != empty
    shown = set(re.findall(r"\(figures/(\S+\.svg)\)", page))
    assert shown == {path.name for path in all_of_it.FIGURES.glob("*.svg")}
    drawn = ROOT / "diffs" / "figures" / "where-the-time-goes.json"
    assert all_of_it.DATA.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


@pytest.mark.weekly("every program of all.py in a small setting: 90 runs")
def test_all_of_it_is_measured_anew(all_of_it, monkeypatch):
    commands = [(n, f"{c} {SMALL[c.partition('.py')[0]]}") for n, c in all_of_it.COMMANDS]
    files = {path.name: path.unlink() for path in all_of_it.FIGURES.iterdir()}
    monkeypatch.setattr(all_of_it, "COMMANDS", commands)
    monkeypatch.setattr(sys, "argv", ["all.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    all_of_it.main()
    assert {path.name for path in all_of_it.FIGURES.iterdir()} == set(files)
    rows = all_of_it.read("peers")["programs"]
    assert {row["name"] for row in rows if row["SIGTERM"] == 0} == {"step 5"}
    for row in rows:  # a half epoch of 51 steps, or one and a half
        whole = row["name"] in ("DDP series", "bare loop")
        assert (row["SIGKILL"], row["counted"]) == ((76, None) if whole else (25, 359))
        assert row["samples/s"]["value"] > 0
    rows = all_of_it.read("lines-2-of-128")["ratios"]
    assert len(rows) > 9 and all(row["median"] > 0 for row in rows)
    one, two = [], []  # the rate was chosen for the batch of two, so there no rule changes it
    for row in all_of_it.read("learning_rate")["summary"]:
        (one if row["processes"] == 1 else two).append(row["median"])
    assert (len({*one}), len({*two})) == (3, 1)


def test_breakdown(tmp_path):
    """Gradients of 4 kB or more each fill a bucket; smaller ones share one."""
    words = (SMALL["breakdown"], "--bucket-mb=0.004", "--batch-size=8")
    finished(forked(BENCHMARKS / "breakdown.py", *words), tmp_path)
    found = json.loads((tmp_path / "timeline-2.json").read_text(encoding="utf-8"))
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
    assert "rank 1</text>" in (tmp_path / "timeline-2.svg").read_text(encoding="utf-8")


def test_ddp_by_hand(tmp_path):
    """Each gradient is sent once; the first of eight all-reduces starts after or in backward."""
    finished(forked(BENCHMARKS / "by_hand.py", *SMALL["by_hand"].split()), tmp_path)
    found = json.loads((tmp_path / "by_hand-2.json").read_text(encoding="utf-8"))
    after, during, buckets, ddp = found["ways"].values()
    assert len({row["bytes"] for row in found["ways"].values()}) == 1
    assert buckets["all_reduces"] == ddp["all_reduces"] == 1
    assert after["all_reduces"] == during["all_reduces"] == 8
    assert after["first_starts"] > 1 > during["first_starts"]
    for step in found["drawn"].values():
        moments = [at for part in step if part != "all-reduce" for at in step[part][0]]
        assert moments == sorted(moments)


DEALS = """
import re
from pathlib import Path
from torch.utils.data.distributed import DistributedSampler

def kilobytes(which):  # not getrusage: its peak begins with that of the process that forked
    return int(re.search(which + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = kilobytes("VmRSS")
list(DistributedSampler(range(10**6), 2, rank=0))
print(1024 * (kilobytes("VmHWM") - before) / 10**6)
"""


def test_a_sampler_holds_48_bytes_for_each_sample(tmp_path):
    size = float(finished([sys.executable, "-c", DEALS], tmp_path).stdout)
    assert size == pytest.approx(48, rel=0.1)
