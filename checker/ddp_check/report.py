"""The verdicts on a script, and the report that shows them."""

import contextlib
import json
import os
import sys
from collections import Counter
from itertools import starmap
from pathlib import Path

from ddp_check import events
from ddp_check.drills import DRILLS
from ddp_check.keeper import kept_folder
from ddp_check.rules import RULES, judge
from ddp_check.rules.base import (
    BROKEN,
    FRAGILE,
    NONE,
    PASS,
    SLOW,
    UNSEEN,
    UNSURE,
    WRONG,
    Verdict,
    short,
)
from ddp_check.run import Plan

LABELS = {  # status -> how its line in the report begins; the worst come first
    WRONG: "FAIL",
    BROKEN: "ERROR",
    FRAGILE: "WARN",
    SLOW: "WARN",
    UNSURE: "unsure",
    PASS: "pass",
    UNSEEN: "not seen",
    NONE: "n/a",
}
FOLDED = (UNSEEN, NONE)
LEVELS = {
    WRONG: "error",
    BROKEN: "error",
    FRAGILE: "warning",
    SLOW: "warning",
    UNSURE: "notice",
}  # GitHub's
TAIL = 8  # lines of a traceback
CLEAN, FAULTY, UNKNOWN = range(3)  # the exit codes
SUMMARIES = ("nothing wrong", "wrong", "no verdict")
NO_TRAINING = "no training was seen"
MANY = 4  # translated calls that are shown


@contextlib.contextmanager
def planned(script, arguments=(), nproc=2, timeout=300, launcher=None, **options):
    """Yield the plan for a script, whose runs stay in a temporary folder."""
    with kept_folder() as folder:
        yield Plan(script, arguments, nproc, timeout, launcher, folder, **options)


def perform(name, plan):
    """Return the verdicts of a drill: [(title, verdict)]."""
    drill, _ = DRILLS[name]
    try:
        verdicts = drill(plan)
    except Exception as error:  # a drill that breaks must not cost the whole report
        verdicts = [("the drill", Verdict(BROKEN, repr(error)))]
    return [(f"{name}: {title}", verdict) for title, verdict in verdicts]


def check(plan, drills=()):
    """Run a script and the drills; return all verdicts as `judge` does."""
    say(f"running {plan.script}: {plan.nproc} processes, {plan.launcher}")
    verdicts = judge(plan.undisturbed)
    for name in drills:
        say(f"drill: {name}")
        verdicts += perform(name, plan)
    return verdicts


def say(text):
    print(f"ddp_check: {text}", file=sys.stderr, flush=True)


def exit_code(plan, verdicts):
    """Return 0 if nothing is wrong, 1 if something is, 2 if that could not be seen."""
    found = {verdict.status for _, verdict in verdicts}
    if WRONG in found:
        return FAULTY
    failed = plan.undisturbed.returncode != 0 or BROKEN in found
    return UNKNOWN if failed or not plan.undisturbed.all(events.Step) else CLEAN


def summary(plan, verdicts):
    """Return the verdict in words."""
    code = exit_code(plan, verdicts)
    broken = [name_of(title) for title, verdict in verdicts if verdict.status == BROKEN]
    text = SUMMARIES[code]
    if code == UNKNOWN and plan.undisturbed.returncode == 0 and not broken:
        text = NO_TRAINING
    return f"{text}, and the checker itself failed in {', '.join(broken)}" if broken else text


# ---------------------------------------------------------------- as text


def message(title, verdict, place):
    """Return a verdict on one line."""
    kind = f"{verdict.status}: " if verdict.status in (FRAGILE, SLOW) else ""
    at = f" ({place})" if place and verdict.status != NONE else ""
    return f"{kind}{title}: {verdict.text}{at}"


def line(title, verdict):
    """Return a verdict as one or more lines of the report."""
    lines = [f"{LABELS[verdict.status]:<8} {message(title, verdict, short(verdict.where))}"]
    if verdict.status in LEVELS:
        lines += [f"{'':<8} see pitfalls/{verdict.page}.md"] if verdict.page else []
        lines += [f"{'':<8} | {text}" for text in verdict.details[-TAIL:]]
    return "\n".join(lines)


def conclude(name, verdicts):
    """Return a line that says whether the promise of a drill holds, and if not, why."""
    _, promise = DRILLS[name]
    found = [one for _, one in verdicts if one.status not in (FRAGILE, PASS)]  # how it is loaded
    if any(one.status == WRONG for one in found):
        return f"{name}: do not rely on it: {promise}"
    if not found:
        return f"{name}: you may rely on it: {promise}"
    return f"{name}: not shown ({found[0].text}): {promise}"


def ranked(verdicts):
    """Return the verdicts, the worst first, and causes before their consequences."""
    order = list(LABELS)
    return sorted(verdicts, key=lambda one: (order.index(one[1].status), one[1].follows))


def name_of(title):
    """Return the name of the rule or drill that gave the verdict with this title."""
    names = {rule.title: rule.name for rule in RULES}
    return names.get(title) or title.partition(":")[0]


def headline(plan, verdicts):
    """Return the three lines that come first: the verdict, its first reason, and what was run."""
    run, counts = plan.undisturbed, Counter(verdict.status for _, verdict in verdicts)
    found = ", ".join(f"{counts[status]} {status}" for status in LABELS if counts[status])
    title, worst = ranked(verdicts)[0]
    reason = f"all {counts[PASS]} rules that saw something pass"
    if worst.status in LEVELS:
        reason = f"first: {message(title, worst, short(worst.where))}"
    where = "its GPU calls translated for the CPU" if run.translate else "on the CPU"
    option = f" with {run.option}" if run.option else ""
    ran = f"ran: {plan.nproc} processes under {run.launcher}{option}, {where}, {run.seconds:.0f} s"
    return [f"{plan.script}: {summary(plan, verdicts)}: {found}", reason, ran]


def text_of(plan, verdicts, everything=False):
    """Return the report, as `check` gave the verdicts."""
    shown = [one for one in ranked(verdicts) if everything or one[1].status not in FOLDED]
    lines = [*headline(plan, verdicts), "", *starmap(line, shown)]
    folded = [name_of(title) for title, verdict in verdicts if verdict.status in FOLDED]
    if folded and not everything:
        lines.append(f"not seen: {', '.join(dict.fromkeys(folded))} (--all says why)")
    drilled = {name: [] for name in DRILLS}
    for title, verdict in verdicts:
        drilled.get(title.partition(":")[0], []).append((title, verdict))
    lines += ["", *(conclude(name, found) for name, found in drilled.items() if found)]
    if plan.lacking:
        lines.append(f"Without a GPU, the script ended with: {plan.lacking}")
    lines += changes(plan, everything)
    return "\n".join(lines).rstrip("\n")


def changes(plan, everything):
    """Return lines that say what the checker did that the script would not have done."""
    lines, run = [], plan.undisturbed
    if calls := translated(plan):
        shown = calls if everything else calls[:MANY]
        more = f" and {len(calls) - MANY} more (--all)" if len(calls) > len(shown) else ""
        lines.append(f"Translated for the CPU: {', '.join(shown)}{more}")
    if any(event.models for event in run.all(events.Leave)) and not run.for_nccl:
        text = "Changed: destroy_process_group waits 50 ms. Without it, a model that is freed later"
        lines.append(f"{text}, as here, can hang in rare cases (pitfalls/handler_holds_model.md)")
    return lines


def translated(plan):
    """Return the calls that were translated, with their lines."""
    calls = plan.undisturbed.all(events.Translated)
    return list(dict.fromkeys(f"{call.call} ({short(call.where)})" for call in calls))


# ---------------------------------------------------------------- for programs


def split(where):
    """Return the file and the line number of "file:line", or None for each."""
    path, _, number = where.rpartition(":")
    return (path, int(number)) if path else (None, None)


def json_of(plan, verdicts):
    """Return the report as JSON."""
    run, code = plan.undisturbed, exit_code(plan, verdicts)
    results = [
        {
            "check": name_of(title),
            "title": title,
            **{"status": verdict.status, "text": verdict.text},
            **dict(zip(("file", "line"), split(verdict.where))),
            **{"pitfall": verdict.page or None, "details": list(verdict.details)},
        }
        for title, verdict in verdicts
    ]
    found = {"script": str(plan.script), "verdict": summary(plan, verdicts), "exit_code": code}
    how = {"processes": plan.nproc, "launcher": run.launcher, "seconds": round(run.seconds, 1)}
    more = {"translated": translated(plan), "results": results}
    return json.dumps({**found, **how, **more}, indent=2)


def annotations(plan, verdicts):
    """Return GitHub's commands that show the verdicts beside the lines of the script."""
    return "\n".join(
        annotation(plan.path, title, verdict)
        for title, verdict in ranked(verdicts)
        if verdict.status in LEVELS
    )


def annotation(script, title, verdict):
    path, number = split(verdict.where)
    top = os.environ.get("GITHUB_WORKSPACE") or Path.cwd()  # a path must be relative to this
    values = {"file": os.path.relpath(path or script, top), "line": number or 1, "title": title}
    text = ",".join(f"{name}={escaped(str(value), ',:')}" for name, value in values.items())
    return f"::{LEVELS[verdict.status]} {text}::{escaped(verdict.text)}"


def escaped(text, more=""):
    """Return a text as GitHub's commands need it."""
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return text
