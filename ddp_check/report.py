"""The verdicts on a script, and the report that shows them."""

import contextlib
import tempfile
from collections import Counter
from itertools import starmap

from ddp_check.drills import DRILLS
from ddp_check.rules import BROKEN, FAIL, NONE, PASS, RULES, UNSEEN, Verdict
from ddp_check.run import Plan


@contextlib.contextmanager
def planned(script, arguments=(), nproc=2, timeout=300, launcher=None):
    """Run a script in temporary folders."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Plan(script, arguments, nproc, timeout, launcher, folder)


def judge(run):
    """Return the verdict of each rule: [(title, verdict)]."""
    return [(rule.__doc__, rule(run)) for rule in RULES]


def perform(name, plan):
    """Return the verdicts of a drill: [(title, verdict)]."""
    drill, _ = DRILLS[name]
    try:
        verdicts = drill(plan)
    except Exception as error:  # a drill that cannot be judged must not end the report
        verdicts = [("the drill", Verdict(UNSEEN, f"{BROKEN}: {error!r}"))]
    return [(f"{name}: {title}", verdict) for title, verdict in verdicts]


def line(title, verdict):
    """Return a verdict as one line of the report, or two."""
    text = f"{verdict.status:<15} {title}: {verdict.text}"
    if verdict.where and verdict.status != NONE:
        text += f" ({verdict.where})"
    if verdict.status == FAIL and verdict.pitfall:
        text += f"\n{'':<15} see pitfalls/{verdict.pitfall}.md"
    return text


def conclude(name, verdicts):
    """Return what a reader may rely on after a drill."""
    _, promise = DRILLS[name]
    found = {verdict.status for _, verdict in verdicts}
    if FAIL in found:
        return f"{name}: do not rely on it: {promise}"
    return f"{name}: {'you may rely on it' if found == {PASS} else 'not shown'}: {promise}"


def report(plan, drills=()):
    """Run a script and the drills; print all verdicts, and return them."""
    verdicts = judge(plan.undisturbed)
    print("\n".join(starmap(line, verdicts)), flush=True)
    for name in drills:
        found = perform(name, plan)
        print("\n".join(["", *starmap(line, found), conclude(name, found)]), flush=True)
        verdicts += found
    calls = [f"{event['call']} ({event['where']})" for event in plan.undisturbed.all("translated")]
    if plan.lacking:
        print(f"\nWithout a GPU, the script ended with: {plan.lacking}")
    if calls:
        print("\nTranslated for the CPU:", ", ".join(dict.fromkeys(calls)))
    count = Counter(verdict.status for _, verdict in verdicts)
    print("\n" + ", ".join(f"{number} {status}" for status, number in count.items()))
    return verdicts
