"""Helpers for the tests of the checker."""

from pathlib import Path

import pytest
from ddp_check.plan import LAUNCHERS, Plan, planned
from ddp_check.report import page_of
from ddp_check.rules import judge
from ddp_check.rules.base import BROKEN, NOT_APPLICABLE, PASS, UNSEEN
from support import server
from support.once import once
from support.scripts import LONG, ROOT, SCRIPT

BASE = (ROOT / "more" / "checker" / "tests" / "base.py").read_text(encoding="utf-8")
SPAWNED = [  # changes to the base, which then starts its own processes
    ("def main():\n", "def main(rank):\n"),
    ('group("gloo")', 'group("gloo", f"file://{os.getcwd()}/met", rank=rank, world_size=2)'),
    (
        "    main()\n",
        """    ranks = [torch.multiprocessing.Process(target=main, args=[n]) for n in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
""",
    ),
]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run in an empty folder: the checker takes a script's files from the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def fork_ranks(monkeypatch):
    """Let the checker fork the ranks instead of starting torchrun: it takes a third of the time.

    The ranks have imported everything before the script does, and a signal to all kills them.
    """
    for launcher, nprocs in (("torchrun", "NPROC"), ("python", 0)):
        *words, _ = server.command("script", nprocs=nprocs)
        monkeypatch.setitem(LAUNCHERS, launcher, [str(word) for word in words])


def observed(path, *arguments, nproc=2):
    """Return the undisturbed run of a script; all tests with the same text share it."""

    def make(shared):
        (shared / "empty").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(shared / "empty")
            patch.setenv("OMP_NUM_THREADS", "1")
            return Plan(path, arguments, nproc, 300, None, shared).undisturbed

    return once(("observed", path.read_text(encoding="utf-8"), arguments, nproc), make)


def plan_of(step, folder, nproc=2):
    """Return the plan for a step, with a run that all tests share."""
    plan = Plan(SCRIPT[step], LONG, nproc, 300, None, folder)
    plan.undisturbed = observed(SCRIPT[step], *LONG, nproc=nproc)
    assert plan.undisturbed.returncode == 0, plan.undisturbed.output
    return plan


def named(verdicts):
    """Return the verdicts of all rules by the names of the rules."""
    found = {verdict.rule: verdict for verdict in verdicts}
    assert [verdict for verdict in found.values() if verdict.status == BROKEN] == []
    assert all((ROOT / page_of(verdict)).exists() for verdict in verdicts)
    return found


def judged(script, *arguments, **options):
    """Run a script; return the run, and the verdicts by the names of the rules."""
    with planned(script, arguments, **options) as plan:
        return plan.undisturbed, named(judge(plan.undisturbed))


def passed(verdicts):
    return {name for name, verdict in verdicts.items() if verdict.status == PASS}


def reported(verdicts):
    """Return what a report shows at once: {rule: status}."""
    quiet = (PASS, UNSEEN, NOT_APPLICABLE)
    return {name: one.status for name, one in verdicts.items() if one.status not in quiet}


def after(line, more):
    """Return the change that adds lines after one."""
    return line, line + more


def before(line, more):
    return line, more + line


def line_of(verdict):
    """Return the line of a script that a verdict points to, or an empty string."""
    path, _, number = verdict.where.rpartition(":")
    if not Path(path).is_file():
        return ""
    return Path(path).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
