"""The benchmarks run and count correctly; no test checks how fast anything is."""

import json
import sys

import pytest
from support.jobs import finished
from support.scripts import ROOT, forked

BENCHMARKS = ROOT / "more" / "benchmarks"
PARTS = ("forward", "backward", "waiting", "optimizer")


def run(folder, name, command):
    """Run a benchmark in a folder; return what it wrote."""
    finished(command, folder, {"CUDA_VISIBLE_DEVICES": ""})
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def is_sorted(step, parts):
    moments = [moment for part in parts for moment in step[part][0]]
    return moments == sorted(moments)


def test_ratios_are_taken_within_a_round(monkeypatch):
    """The speed of the machine drifts a hundredfold, which must not change any ratio."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import shared

    speeds = {"one": [100, 1000, 10], "four": [200, 3000, 40]}
    found = shared.rounds({name: iter(own).__next__ for name, own in speeds.items()}, 3)
    assert shared.relative(found["four"], found["one"]) == {"low": 2.5, "median": 3, "high": 3.5}


@pytest.mark.weekly("trains seven times under torchrun, once with torch.compile")
def test_peers(tmp_path):
    options = ["--repeats=1", "--epochs=2", "--width=2"]
    found = run(tmp_path, "peers", [sys.executable, BENCHMARKS / "peers.py", *options])
    assert all(row["samples_per_second"] > 0 for row in found["programs"])


def test_breakdown(tmp_path):
    """Gradients of 4 kB or more each fill a bucket; smaller ones share one."""
    (tmp_path / "figure.json").write_text('{"records": {}}', encoding="utf-8")
    options = ("--width=4", "--bucket-mb=0.004", "--batch-size=8", "--figure=figure.json")
    found = run(tmp_path, "breakdown", forked(BENCHMARKS / "breakdown.py", *options))
    figure = json.loads((tmp_path / "figure.json").read_text(encoding="utf-8"))
    assert figure == {"records": {"2": found}}
    assert len(found["bucket_bytes"]) > 1
    for rank, means in zip(found["ranks"], found["milliseconds_by_rank"], strict=True):
        assert is_sorted(rank, ("data", *PARTS))
        for (ready, _), (start, end) in zip(rank["ready"], rank["all-reduce"], strict=True):
            assert rank["forward"][0][1] < ready <= start < end <= rank["optimizer"][0][0]
        assert 0 <= means["hidden"] <= means["all-reduce"]


def test_ddp_by_hand(tmp_path):
    """Each gradient is sent once; the first of eight all-reduces starts after or in backward."""
    options = ("--width=8", "--rounds=1", "--steps=1", "--profiled=3")
    found = run(tmp_path, "by_hand", forked(BENCHMARKS / "by_hand.py", *options))
    after, during, buckets, ddp = found["ways"].values()
    assert after["bytes"] == during["bytes"] == buckets["bytes"] == ddp["bytes"]
    assert buckets["all_reduces"] == ddp["all_reduces"] == 1
    assert after["all_reduces"] == during["all_reduces"] == 8
    assert after["first_starts"] > 1 > during["first_starts"]
    assert all(is_sorted(step, PARTS) for step in found["drawn"].values())
