"""Helpers for the tests of the checker."""

from pathlib import Path

import pytest
from ddp_check.report import conclude, perform, planned
from ddp_check.rules import RULES, judge
from ddp_check.rules.base import BROKEN, NONE, PASS, UNSEEN, WRONG
from ddp_check.run import LAUNCHERS, Plan
from support import server
from support.once import once
from support.scripts import LONG, SCRIPT


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run in an empty folder: the checker takes a script's files from the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def fork_ranks(monkeypatch):
    """Let the checker fork the ranks instead of starting torchrun: it takes a third of the time.

    The ranks have imported everything before the script does, and a signal to all kills them.
    """
    *words, _ = server.command("script", nprocs="NPROC")
    monkeypatch.setitem(LAUNCHERS, "torchrun", [str(word) for word in words])


def plan_of(step, folder, nproc=2):
    """Return the plan for a step. Its undisturbed run is shared by all pytest workers."""

    def make(shared):
        (shared / "empty").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(shared / "empty")
            patch.setenv("OMP_NUM_THREADS", "1")
            run = Plan(SCRIPT[step], LONG, nproc, 300, None, shared).undisturbed
        assert run.returncode == 0, run.output
        return run

    plan = Plan(SCRIPT[step], LONG, nproc, 300, None, folder)
    plan.undisturbed = once(("observed", plan.text, nproc), make)
    return plan


def named(verdicts):
    """Return the verdicts of all rules by the names of the rules."""
    found = {rule.name: verdict for rule, (_, verdict) in zip(RULES, verdicts)}
    assert [verdict for verdict in found.values() if verdict.status == BROKEN] == []
    return found


def judged(script, *arguments, **options):
    """Run a script; return the run, and the verdicts by the names of the rules."""
    with planned(script, arguments, **options) as plan:
        return plan.undisturbed, named(judge(plan.undisturbed))


def failed(verdicts):
    return [name for name, verdict in verdicts.items() if verdict.status == WRONG]


def passed(verdicts):
    return {name for name, verdict in verdicts.items() if verdict.status == PASS}


def told(verdicts):
    """Return what a report shows at once: {rule: status}."""
    quiet = (PASS, UNSEEN, NONE)
    return {name: one.status for name, one in verdicts.items() if one.status not in quiet}


def line_of(verdict):
    """Return the line of a script that a verdict points to."""
    path, _, number = verdict.where.rpartition(":")
    return Path(path).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()


def drill_passes(plan, name):
    """Check that each verdict of a drill is a pass."""
    verdicts = perform(name, plan)
    assert [verdict for _, verdict in verdicts if verdict.status != PASS] == []
    assert "you may rely on it" in conclude(name, verdicts)
