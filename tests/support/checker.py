"""The checker, as its tests call it."""

import pytest
from support import server
from support.once import once
from support.scripts import LONG, SCRIPT

from ddp_check.report import conclude, judge, perform, planned
from ddp_check.rules import BROKEN, FAIL, PASS, RULES
from ddp_check.run import LAUNCHERS, Plan


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run in a folder of its own: the checker looks for a script's files in the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def fork_ranks(monkeypatch):
    """Let the checker fork a script's ranks where it would start torchrun: a third of the time.

    They have imported everything before the script does, and a signal to all of them kills them.
    """
    *words, _ = server.command("script", nprocs="NPROC")
    monkeypatch.setitem(LAUNCHERS, "torchrun", [str(word) for word in words])


def plan_of(step, folder, nproc=2):
    """Return the plan for a step, whose undisturbed run is made once for all workers."""

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
    found = {rule.__name__: verdict for rule, (_, verdict) in zip(RULES, verdicts)}
    assert [verdict for verdict in found.values() if BROKEN in verdict.text] == []
    return found


def judged(script, *arguments, **options):
    """Return the run of a script and its verdicts by the names of the rules."""
    with planned(script, arguments, **options) as plan:
        return plan.undisturbed, named(judge(plan.undisturbed))


def failed(verdicts):
    return [name for name, verdict in verdicts.items() if verdict.status == FAIL]


def passed(verdicts):
    return {name for name, verdict in verdicts.items() if verdict.status == PASS}


def drill_passes(plan, name):
    """Check that a script passes a drill in all that it judges."""
    verdicts = perform(name, plan)
    assert [verdict for _, verdict in verdicts if verdict.status != PASS] == []
    assert "you may rely on it" in conclude(name, verdicts)
