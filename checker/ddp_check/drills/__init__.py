"""The drills: what is left of a run that is killed, stopped, split or resized.

How to write one stands in rules/base.py. A drill that could not decide says so before it runs the
script again, from what the undisturbed run has shown.
"""

from dataclasses import replace

from ddp_check.drills.resume import kill, own_folders, sigterm
from ddp_check.drills.world_size import world_size
from ddp_check.rules.base import BROKEN, FRAGILE, PASS, WRONG, Verdict, unseen

DRILLS = {
    "kill": kill,
    "sigterm": sigterm,
    "own-folders": own_folders,
    "world-size": world_size,
}


def perform(name, plan):
    """Return the verdicts of a drill."""
    try:
        verdicts = list(DRILLS[name](plan)) or [("the drill", unseen("it has shown nothing"))]
    except Exception as error:  # a drill that breaks must not cost the whole report
        verdicts = [("the drill", Verdict(BROKEN, repr(error)))]
    return [replace(verdict, rule=name, title=f"{name}: {title}") for title, verdict in verdicts]


def conclude(name, verdicts):
    """Return a line that says whether the promise of a drill holds, and if not, why."""
    doubts = [verdict for verdict in verdicts if verdict.status not in (FRAGILE, PASS)]
    holds = f"not shown ({doubts[0].text})" if doubts else "you may rely on it"
    if any(verdict.status == WRONG for verdict in doubts):
        holds = "do not rely on it"
    return f"{name}: {holds}: {DRILLS[name].__doc__}"
