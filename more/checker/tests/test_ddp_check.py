"""The checker finds nothing wrong with our steps, and observing them changes nothing."""

import dataclasses
import os
import random

import pytest
from checking import BASE, before, named, observed, passed, plan_of, reported
from ddp_check import events
from ddp_check.drills import conclude, perform
from ddp_check.rules import judge
from ddp_check.rules.base import PASS
from support.results import same_bits
from support.scripts import LONG, write

pytestmark = pytest.mark.usefixtures("own_folder")
UNSHOWN = {"clipping_comes_last", "random_numbers_differ", "gradients_pass_collectives"}
OF_ONE_RANK = {"each_sample_is_evaluated_once", "result_is_of_all"}  # where rank 0 evaluates
HANDLES = before(
    "    torch.manual_seed(rank)\n",
    "    import signal\n    signal.signal(signal.SIGTERM, lambda *_: None)\n",
)
WEEKLY = pytest.mark.weekly("step 5 has all the lines that the steps share")


@pytest.mark.parametrize(
    "step", ["05", *(pytest.param(step, marks=WEEKLY) for step in ("02", "03", "04"))]
)
def test_our_scripts_pass(step, tmp_path):
    run = plan_of(step, tmp_path).undisturbed
    verdicts = named(judge(run))
    assert reported(verdicts) == {}, run.output
    others = OF_ONE_RANK if step != "05" else set()
    assert UNSHOWN <= verdicts.keys() - passed(verdicts) <= UNSHOWN | others


@pytest.mark.slow
def test_observation_changes_no_bit(tmp_path, trained):
    """Nor does observation leave a file behind."""
    run = plan_of("05", tmp_path).undisturbed
    assert same_bits(run.cwd / "checkpoint.pt", trained("05", *LONG))
    assert os.listdir(run.cwd) == ["checkpoint.pt"]


@pytest.mark.slow
def test_whatever_is_missing_each_rule_has_a_verdict(tmp_path, fork_ranks):
    """Ranks that never join, missing kinds of events, and runs cut short anywhere."""
    run, chance = observed(write(tmp_path / "train.py", BASE, [HANDLES])), random.Random(0)
    kinds = {type(event) for event in run.events_by_rank[0]}
    assert {one.__name__ for one in kinds} >= {"Join", "Wrap", "PassBegun", "Step", "Save", "Exit"}
    assert events.SigtermHandler in kinds
    less = [
        {},
        {0: run.events_by_rank[0]},
        {1: run.events_by_rank[1]},
        {0: [], 1: run.events_by_rank[1]},
    ]
    for kind in kinds:
        left = {r: [e for e in of if type(e) is not kind] for r, of in run.events_by_rank.items()}
        less += [left, {**run.events_by_rank, 0: left[0]}, {**run.events_by_rank, 1: left[1]}]
    for _ in range(10):
        less.append({r: of[: chance.randrange(len(of))] for r, of in run.events_by_rank.items()})
    for ranks in less:
        for code in (0, 1, None):
            named(judge(dataclasses.replace(run, events_by_rank=ranks, returncode=code)))


# ---------------------------------------------------------------- drills

DRILLS = ["05 kill", "05 sigterm", "05 world-size"]
OTHERS = ["04 kill", "04 sigterm", "04 world-size", "03 kill", "03 world-size", "02 kill"]


@pytest.mark.slow
@pytest.mark.parametrize("drill", [*DRILLS, *(pytest.param(one, marks=WEEKLY) for one in OTHERS)])
def test_our_scripts_pass_the_drills(drill, tmp_path, request):
    step, name = drill.split()
    plan = plan_of(step, tmp_path)
    if name == "world-size":  # the others depend on the launcher
        request.getfixturevalue("fork_ranks")
    verdicts = perform(name, plan)
    assert [verdict for verdict in verdicts if verdict.status != PASS] == []
    assert "you may rely on it" in conclude(name, verdicts)
