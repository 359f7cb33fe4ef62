"""The drills, which run the script again and kill it, stop it or change its world size."""

from dataclasses import replace

from ddp_check.drills import resume, world_size
from ddp_check.rules.base import BROKEN, FRAGILE, PASS, WRONG, Verdict, unseen

DRILLS = {
    "kill": resume.kill,
    "sigterm": resume.sigterm,
    "world-size": world_size.world_size,
}
CANNOT_DECIDE = {  # drill -> function that returns why the drill cannot decide, or ""
    **dict.fromkeys(("kill", "sigterm"), resume.cannot_resume),
    "world-size": world_size.cannot_compare,
}


def perform(name, plan):
    """Return the verdicts of a drill. If it cannot decide, the script is not run again."""
    try:
        if reason := CANNOT_DECIDE[name](plan.undisturbed):
            verdicts = [("it cannot decide", unseen(reason))]
        else:
            verdicts = list(DRILLS[name](plan))
    except Exception as error:  # an error in a drill must not prevent the report
        verdicts = [("it has failed", Verdict(BROKEN, repr(error)))]
    return [replace(verdict, rule=name, title=f"{name}: {title}") for title, verdict in verdicts]


def conclude(name, verdicts):
    """Return a line that says whether the promise of a drill holds, and if not, why."""
    doubts = [verdict for verdict in verdicts if verdict.status not in (FRAGILE, PASS)]
    if any(verdict.status == WRONG for verdict in doubts):
        holds = "do not rely on it"
    else:
        holds = "not shown" if doubts else "you may rely on it"
    return f"{name}: {holds}: {DRILLS[name].__doc__}"
