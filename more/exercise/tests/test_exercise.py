"""The exercise: its script learns, its solution is correct, and its page shows what was run."""

import re
import sys
from difflib import ndiff

import pytest
import torch
from support.jobs import finished, run
from support.results import epochs, losses
from support.scripts import ON_PATH, ROOT, SCRIPT, forked, write

SLOW = pytest.mark.slow
FOLDER = ROOT / "more" / "exercise"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SMALL = [  # trains in seconds
    ("width = 64", "width = 16"),
    ("layers = 2", "layers = 1"),
    ("sorted(topics))", "sorted(topics))[:40_000]"),
]


def small(folder, name, batch, *changes):
    """Write a small version of the exercise's script or solution, with this batch per process."""
    folder.mkdir(exist_ok=True)
    changes = [*SMALL, ("batch_size = 32", f"batch_size = {batch}"), *changes]
    return write(folder / name, (FOLDER / name).read_text(encoding="utf-8"), changes)


def report_on(script, *words):
    """Run the checker's command in a script's folder; return what it printed."""
    env = {"PYTHONPATH": str(ROOT / "more" / "checker"), **ON_PATH}
    return run([sys.executable, "-m", "ddp_check", *words], script.parent, env, timeout=900).stdout


def held_out(job):
    """Return the held-out loss, and the text that the GPT has written."""
    loss, text = re.search(r"^held-out loss ([\d.]+)\n((?s:.*))\n\Z", job.stdout, re.M).groups()
    return float(loss), text


def test_it_learns_and_writes(tmp_path):
    loss, text = held_out(finished(forked(FOLDER / "train.py", "1", nprocs=0), tmp_path))
    assert loss < 2.5
    assert len(text.split()) > 20  # it has learned to write words


@pytest.mark.gpu
@SLOW
def test_two_ranks_follow_one_with_twice_the_batch(tmp_path):
    """One rank with the normal batch, in twice as many steps, continues from the checkpoint."""
    one = finished(forked(small(tmp_path, "train.py", 16), "6", nprocs=0), tmp_path)
    two = finished(forked(small(tmp_path / "two", "solution.py", 8), "6"), tmp_path / "two")
    assert epochs(one) == epochs(two) == [1, 2, 3, 4, 5, 6]
    ours, theirs = ([*map(float, losses(job)), held_out(job)[0]] for job in (two, one))
    assert ours == pytest.approx(theirs, rel=0.04)
    more = finished(forked(small(tmp_path, "solution.py", 8), "7", nprocs=1), tmp_path)
    assert more.stdout.startswith("resuming from gpt.pt after epoch 6\nepoch 7  loss ")
    saved = torch.load(tmp_path / "gpt.pt", weights_only=True)["optimizer"]
    assert saved["param_groups"][0]["lr"] == 0  # the schedule ended with the last step


DRILLS = pytest.param(
    [f"--drill={name}" for name in ("kill", "sigterm", "world-size")],
    marks=pytest.mark.weekly("the checker's three drills, each of which runs it several times"),
    id="drills",
)


@SLOW
@pytest.mark.parametrize("words", [[], DRILLS])
def test_the_checker_passes_the_solution(tmp_path, words):
    report = report_on(small(tmp_path, "solution.py", 8), *words, "solution.py", "6")
    assert report.startswith(f"solution.py: nothing wrong: {'' if words else '15 pass'}")


@SLOW
def test_the_checker_says_what_is_shown(tmp_path):
    fresh = ("if os.path.exists(path):", "if False:")  # a rank that starts late would find a file
    script = small(tmp_path, "train.py", 8, fresh).rename(tmp_path / "my_train.py")
    texts = report_on(script, "my_train.py", "2"), PAGE
    faults = r"^FAIL.*\n(?: .*\n)*"  # with their lines of continuation
    printed, shown = (" ".join("".join(re.findall(faults, text, re.M)).split()) for text in texts)
    assert re.sub(r"\d+ samples", "6539 samples", printed) == shown


def test_its_new_functions_are_those_of_the_ladder():
    step, solution = (path.read_text("utf-8") for path in (SCRIPT["05"], FOLDER / "solution.py"))
    for name in "def ddp_setup", "def log", "class ResumableSampler":
        assert re.search(rf"^{name}\b(?s:.*?)\n\n\n", step, re.MULTILINE)[0] in solution


def test_its_batch_file_is_that_of_step_4():
    """But for the names of the script, its checkpoint, and the job."""
    files = ROOT / "slurm" / "04_multinode.sbatch", FOLDER / "solution.sbatch"
    lines = ndiff(*(path.read_text(encoding="utf-8").splitlines() for path in files))
    changed = [line for line in lines if line[0] in "-+"]
    assert len(changed) == 11
    assert all(re.search("04_multinode|solution|gpt|checkpoint", line) for line in changed)
