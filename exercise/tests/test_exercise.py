"""The exercise: its script learns, its solution is correct, and its page shows what was run."""

import ast
import math
import re
import shutil
import sys

import pytest
import torch
from checking import drill_passes, failed, fork_ranks, judged, passed
from clusters import ON_A_CLUSTER
from ddp_check.drills import DRILLS
from ddp_check.report import line, planned
from ddp_check.rules import RULES
from generating import generate
from support.jobs import finished
from support.results import epochs, losses
from support.scripts import ROOT, SCRIPT, edit, forked, write

SLOW = pytest.mark.slow
FOLDER = ROOT / "exercise"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SMALL = [  # trains in seconds
    ("width = 64", "width = 16"),
    ("layers = 2", "layers = 1"),
    ("sorted(topics))", "sorted(topics))[:40_000]"),
]


def small(folder, name, batch):
    """Write a small version of the exercise's script or solution, with this batch per process."""
    changes = [*SMALL, ("batch_size = 32", f"batch_size = {batch}")]
    return write(folder / name, (FOLDER / name).read_text(encoding="utf-8"), changes)


@pytest.fixture
def solution(tmp_path, own_folder):
    """A small version of the solution, in an empty current folder."""
    return small(tmp_path, "solution.py", 8)


def parts(job):
    """Return the held-out loss and the text at the end of an output."""
    loss, text = re.search(r"^held-out loss ([\d.]+)\n((?s:.*))\n\Z", job.stdout, re.M).groups()
    return float(loss), text


# ---------------------------------------------------------------- the script, and the solution


def test_it_learns_and_writes(tmp_path):
    job = finished([sys.executable, FOLDER / "train.py", "1"], tmp_path)
    assert epochs(job) == [1]
    loss, text = parts(job)
    assert loss < 2.5 < float(losses(job)[0]) < math.log(100)  # chance, for 103 characters
    assert len(text) == 301
    assert len(text.split()) > 20  # it has learned to write words


@SLOW
def test_two_ranks_follow_one_with_twice_the_batch(tmp_path, solution):
    """One rank with the normal batch, in twice as many steps, continues from the checkpoint."""
    alone = tmp_path / "alone"
    alone.mkdir()
    one = finished([sys.executable, small(alone, "train.py", 16), "6"], alone)
    two = finished(forked(solution, "6"), tmp_path)
    assert epochs(one) == epochs(two) == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(losses(two), losses(one)):
        assert float(ours) == pytest.approx(float(theirs), rel=0.04)
    assert parts(two)[0] == pytest.approx(parts(one)[0], rel=0.04)
    assert len(parts(two)[1]) == 301
    more = finished(forked(solution, "7", nprocs=1), alone)
    assert more.stdout.startswith("resuming from gpt.pt after epoch 6\nepoch 7  loss ")
    assert parts(more)[0] < parts(one)[0]
    saved = torch.load(alone / "gpt.pt", weights_only=True)["optimizer"]
    assert saved["param_groups"][0]["lr"] == 0  # the schedule ended with the last step


@SLOW
def test_the_checker_passes_the_solution(solution):
    run, verdicts = judged(solution, "15")
    assert failed(verdicts) == [], (verdicts, run.output)
    assert passed(verdicts) >= {
        *("one_group", "shards", "new_order", "mean_gradients", "progress", "one_writer"),
        *("the_same_model", "evaluation", "same_collectives", "printed_loss"),
    }


@pytest.mark.weekly  # of step 5's drills
@pytest.mark.parametrize("name", DRILLS)
def test_the_solution_passes_the_drill(solution, name):
    with planned(solution, ["15"]) as plan:
        drill_passes(plan, name)


def definitions(path):
    """Return the source of each top-level function and class: {name: source}."""
    text = path.read_text(encoding="utf-8")
    return {
        part.name: ast.get_source_segment(text, part)
        for part in ast.parse(text).body
        if isinstance(part, ast.FunctionDef | ast.ClassDef)
    }


def test_its_new_functions_are_those_of_the_ladder():
    theirs, ours = definitions(SCRIPT["05"]), definitions(FOLDER / "solution.py")
    new = ours.keys() - definitions(FOLDER / "train.py").keys()
    assert new == {"check_restarts", "ddp_setup", "log", "ResumableSampler", "stop_agreed"}
    for name in new - {"stop_agreed"}:  # which is a method there
        assert ours[name] == theirs[name]


# ---------------------------------------------------------------- the batch file


def test_its_batch_file_is_that_of_step_4():
    text = (ROOT / "slurm" / "04_multinode.sbatch").read_text(encoding="utf-8")
    for old, new in [
        ("slurm/04_multinode.sbatch", "exercise/solution.sbatch"),
        ("[arguments of the script]", "[epochs]"),
        ("--job-name=04_multinode", "--job-name=gpt"),
        ("checkpoint=$SLURM_JOB_NAME.pt", "script=exercise/solution.py\ncheckpoint=gpt.pt"),
        ("  # give each run its own name: --job-name=NAME", "  # as in the script"),
        ('04_multinode.py --checkpoint-path="$checkpoint"', '"$script"'),
    ]:
        assert old in text
        text = text.replace(old, new)
    assert (FOLDER / "solution.sbatch").read_text(encoding="utf-8") == text


@SLOW
@ON_A_CLUSTER
def test_submitted_as_it_is(clone, submit):
    (clone / "exercise").mkdir()
    shutil.copy(FOLDER / "solution.sbatch", clone / "exercise")
    small(clone / "exercise", "solution.py", 8)
    file, options = "exercise/solution.sbatch", ["--gpus-per-node=1"]
    job = submit(file, "2", options=options).completed()
    assert "world size 2 on node[1-2]" in job.output
    assert job.epochs() == [1, 2]
    assert (clone / "gpt.pt").exists()


# ---------------------------------------------------------------- the page


@pytest.mark.slow
def test_a_stale_page_is_noticed(copy):
    edit(copy / "exercise" / "solution.py", "; delete this once fixed", "")
    result = generate(copy, "--check")
    assert (result.returncode, result.stdout) == (1, "stale: exercise/README.md\n")


@SLOW
@pytest.mark.usefixtures("own_folder")
def test_the_checker_says_what_is_shown(tmp_path, monkeypatch):
    fork_ranks(monkeypatch)
    _, verdicts = judged(small(tmp_path, "train.py", 8), "2")
    titles = {rule.__name__: rule.__doc__ for rule in RULES}
    fails = [line(titles[name], verdicts[name]).splitlines()[0] for name in failed(verdicts)]
    (shown,) = re.findall(r"ddp_check exercise/train\.py 2 \| grep FAIL\n((?:FAIL.*\n)+)", PAGE)
    said, shown = (re.sub(r"\d+ samples", "# samples", text) for text in ("\n".join(fails), shown))
    assert said == shown.rstrip("\n")
