"""The benchmarks run and count correctly; no test checks how fast anything is."""

import importlib
import json
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
from support.jobs import finished, run
from support.scripts import ROOT, forked

BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_ratios_are_taken_within_a_repetition(benchmark):
    """The second time, the machine was ten times as fast, which must not change any ratio."""
    speeds = {("weak", 1): 100, ("weak", 4): 300}
    runs = [
        {"kind": kind, "world_size": n, "batch": 9, "repetition": r, "samples_per_second": f * s}
        for r, f in enumerate((1, 10))
        for (kind, n), s in speeds.items()
    ]
    rows = {(row["kind"], row["world_size"]): row for row in benchmark("scaling").summary(runs)}
    ratio = {"low": 3, "median": 3, "high": 3}
    assert rows["weak", 4]["speed_up"] == ratio
    assert rows["weak", 4]["efficiency"] == dict.fromkeys(ratio, 0.75)


def test_the_changed_lines_are_in_the_scripts(benchmark):
    """load() ends the program unless the text to replace occurs exactly once."""
    lines, load = benchmark("lines"), benchmark("shared").load
    for changes in (lines.ANYWHERE | lines.BETWEEN_RANKS).values():
        load("05", changes)
    for changes in lines.ANYWHERE.values():
        load("01", changes)


SMALL = {
    "peers": "--repeats=1 --epochs=2 --width=2",
    "lines": "--seconds=1 --width=1",
    "breakdown": "--width=4",
    "communication": "--repeats=1 --largest=256",
    "scaling": "--repeats=1 --epochs=2 --processes=1 --width=1",
    "learning_rate": "--seeds=1 --epochs=1 --processes=2 --width=4",
    "growth": "--processes=2 --predictions=1000 --samples=100000 --width=8",
}


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


@pytest.mark.weekly("every program of all.py and peers.py in a small setting: 60 torchruns")
def test_all_of_it_is_measured_anew(all_of_it, monkeypatch):
    commands = [(n, f"{c} {SMALL[c.partition('.py')[0]]}") for n, c in all_of_it.COMMANDS]
    files = {path.name: path.unlink() for path in all_of_it.FIGURES.iterdir()}
    monkeypatch.setattr(all_of_it, "COMMANDS", commands)
    monkeypatch.setattr(sys, "argv", ["all.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    all_of_it.main()
    assert {path.name for path in all_of_it.FIGURES.iterdir()} >= set(files)
    rows = all_of_it.read(all_of_it.FIGURES, "peers")["programs"]
    assert {row["name"] for row in rows if row["SIGTERM"] == 0} == {"step 5"}
    for row in rows:  # a half epoch of 51 steps, or one and a half
        whole = row["name"] in ("DDP series", "bare loop")
        assert (row["SIGKILL"], row["counted"]) == ((76, None) if whole else (25, 359))
        assert row["samples/s"]["value"] > 0


def measured(name, cwd, *words, nprocs=0):
    """Run a benchmark in a small setting on forked ranks; return what it wrote."""
    words = [*words, *SMALL[name].split()]
    fast = {"CXX": "none"}  # no compiler, so torch.compile is not tried
    finished(forked(BENCHMARKS / f"{name}.py", *words, nprocs=nprocs), cwd, fast)
    (path,) = {*cwd.glob("[!.t]*.json"), *cwd.glob("timeline*.json")}
    return json.loads(path.read_text(encoding="utf-8"))


def test_lines(tmp_path):
    found = measured("lines", tmp_path, "--batch-size=1024", nprocs=2)
    compared = {(row["name"], row["against"]) for row in found["ratios"]}
    assert {("02", "01 with as many threads"), ("02", "copies of 01"), ("a save", "05")} < compared
    assert {("no vote", "05"), ("AdamW fused", "05")} < compared
    assert all(row["median"] > 0 for row in found["ratios"])


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
    assert "rank 1</text>" in (tmp_path / "timeline-2.svg").read_text(encoding="utf-8")


def test_communication(tmp_path):
    found = measured("communication", tmp_path, nprocs=2)["seconds"]
    assert list(found) == ["4", "16", "64", "256"]
    assert len(found["256"]) == 4 and all(t > 0 for row in found.values() for t in row.values())


def test_scaling(tmp_path):
    runs = measured("scaling", tmp_path)["runs"]
    kinds = {run["kind"] for run in runs if run["samples_per_second"] > 0}
    assert kinds == {"weak", "strong"}


def test_learning_rate(tmp_path):
    """The rate was chosen for the batch of two processes, so there no rule changes it."""
    runs = measured("learning_rate", tmp_path)["runs"]
    assert [run["total"] for run in runs] == [359] * 6
    correct = {n: {run["correct"] for run in runs if run["processes"] == n} for n in (1, 2)}
    assert (len(correct[1]), len(correct[2])) == (3, 1)


def test_the_lines_of_the_peers_are_counted(benchmark):
    """programs() ends the program if the lines that resume have no place in a program."""
    peers = benchmark("peers")
    assert all(peers.lines(text) > 30 for text in peers.programs().values())
    assert peers.lines("x = 1\n\ndef parse_args():\n    return 1\n\n\nprint(x)\n") == 2


@pytest.mark.parametrize(("end", "counted"), [("os.abort()", True), ("sys.exit(1)", False)])
def test_a_peer_that_aborts_after_its_last_step_is_counted(benchmark, tmp_path, end, counted):
    peers = benchmark("peers")
    text = (peers.PROGRAMS / "bare_loop.py").read_text(encoding="utf-8")
    args = {"processes": 2, "threads": 1, "batch_size": 1024, "width": 1, "epochs": 2}
    program = peers.Program(tmp_path, f"{text}import sys\n{end}\n", SimpleNamespace(**args))
    if not counted:
        with pytest.raises(SystemExit, match=re.escape(end)):
            program.timed()
        return
    figures, aborted = program.timed()
    assert aborted and figures["samples/s"] > 0


def test_a_watched_program_notes_its_steps_and_is_killed(tmp_path):
    watched, loop = (BENCHMARKS / "programs" / name for name in ("watched.py", "bare_loop.py"))
    start = forked(watched, loop, "1", "--batch-size=1024", "--width=1")
    env = {"PYTHONPATH": str(ROOT)}
    notes = {"folder": str(tmp_path), "steps": [1, 7]}
    finished(start, tmp_path, {**env, "WATCHED": json.dumps(notes)})
    for rank in (0, 1):
        assert (tmp_path / f"steps-{rank}").stat().st_size == 7
        found = json.loads((tmp_path / f"times-{rank}").read_text(encoding="utf-8"))
        assert found["times"] == sorted({*found["times"]}) and found["peak"] > 1e8
    notes |= {"at": 3, "signal": signal.SIGKILL}
    assert run(start, tmp_path, {**env, "WATCHED": json.dumps(notes)}).returncode != 0
    assert (tmp_path / "steps-0").stat().st_size == 7 + 3


def test_a_sampler_holds_48_bytes_for_each_sample(benchmark):
    growth = benchmark("growth")
    _, size = growth.alone(growth.deal, 10**6)
    assert size / 10**6 == pytest.approx(48, rel=0.1)
