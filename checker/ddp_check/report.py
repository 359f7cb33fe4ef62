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
from ddp_check.ranks import short
from ddp_check.rules import RULES, judge
from ddp_check.rules.base import BROKEN, FRAGILE, NONE, PASS, SLOW, UNSEEN, UNSURE, WRONG, Verdict
from ddp_check.run import Plan

LABELS = {  # status -> how its line in the report begins, and GitHub's level; the worst come first
    WRONG: ("FAIL", "error"),
    BROKEN: ("ERROR", "error"),
    FRAGILE: ("WARN", "warning"),
    SLOW: ("WARN", "warning"),
    UNSURE: ("unsure", "notice"),
    PASS: ("pass", ""),
    UNSEEN: ("not seen", ""),
    NONE: ("n/a", ""),
}
FOLDED = (UNSEEN, NONE)
LEVELS = {status: level for status, (_, level) in LABELS.items() if level}
TAIL = 8  # lines of a traceback
CLEAN, FAULTY, UNKNOWN = range(3)  # the exit codes
SUMMARIES = ("nothing wrong", "wrong", "no verdict")
MANY = 4  # translated calls that are shown


@contextlib.contextmanager
def planned(script, arguments=(), nproc=2, timeout=300, launcher=None, **options):
    with kept_folder() as folder:
        yield Plan(script, arguments, nproc, timeout, launcher, folder, **options)


def perform(name, plan):
    """Return the verdicts of a drill: [(title, verdict)]."""
    try:
        verdicts = list(DRILLS[name](plan))
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
    code = exit_code(plan, verdicts)
    broken = [name_of(title) for title, verdict in verdicts if verdict.status == BROKEN]
    if broken:
        return f"{SUMMARIES[code]}, and the checker itself failed in {', '.join(broken)}"
    idle = code == UNKNOWN and plan.undisturbed.returncode == 0
    return "no training was seen" if idle else SUMMARIES[code]


def message(title, verdict):
    kind = f"{verdict.status}: " if verdict.status in (FRAGILE, SLOW) else ""
    at = f" ({short(verdict.where)})" if verdict.where and verdict.status != NONE else ""
    return f"{kind}{title}: {verdict.text}{at}"


def line(title, verdict):
    lines = [f"{LABELS[verdict.status][0]:<8} {message(title, verdict)}"]
    if verdict.status in LEVELS:
        lines += [f"{'':<8} see pitfalls/{verdict.page}.md"] if verdict.page else []
        lines += [f"{'':<8} | {text}" for text in verdict.details[-TAIL:]]
    return "\n".join(lines)


def conclude(name, verdicts):
    """Return a line that says whether the promise of a drill holds, and if not, why."""
    found = [one for _, one in verdicts if one.status not in (FRAGILE, PASS)]  # how it is loaded
    holds = f"not shown ({found[0].text})" if found else "you may rely on it"
    if any(one.status == WRONG for one in found):
        holds = "do not rely on it"
    return f"{name}: {holds}: {DRILLS[name].__doc__}"


def ranked(verdicts):
    """Return the verdicts, the worst first, and causes before their consequences."""
    order = list(LABELS)
    return sorted(verdicts, key=lambda one: (order.index(one[1].status), one[1].follows))


def name_of(title):
    """Return the name of the rule or drill that gave the verdict with this title."""
    names = {rule.title: rule.name for rule in RULES}
    return names.get(title) or title.partition(":")[0]


def text_of(plan, verdicts, everything=False):
    """Return the report: first the verdict, its first reason, and what was run."""
    run, counts = plan.undisturbed, Counter(verdict.status for _, verdict in verdicts)
    found = ", ".join(f"{counts[status]} {status}" for status in LABELS if counts[status])
    first = ranked(verdicts)[0]
    reason = f"all {counts[PASS]} rules that saw something pass"
    reason = f"first: {message(*first)}" if first[1].status in LEVELS else reason
    where = "its GPU calls translated for the CPU" if run.translate else "on the CPU"
    option = f" with {run.option}" if run.option else ""
    ran = f"ran: {plan.nproc} processes under {run.launcher}{option}, {where}, {run.seconds:.0f} s"
    shown = [one for one in ranked(verdicts) if everything or one[1].status not in FOLDED]
    lines = [f"{plan.script}: {summary(plan, verdicts)}: {found}", reason, ran, ""]
    lines += starmap(line, shown)
    folded = [name_of(title) for title, verdict in verdicts if verdict.status in FOLDED]
    if folded and not everything:
        lines.append(f"not seen: {', '.join(dict.fromkeys(folded))} (--all says why)")
    lines.append("")
    for name in DRILLS:
        drilled = [one for one in verdicts if one[0].startswith(f"{name}: ")]
        lines += [conclude(name, drilled)] if drilled else []
    return "\n".join([*lines, *changes(plan, everything)]).rstrip("\n")


def changes(plan, everything):
    """Return lines that say what the checker did that the script would not have done."""
    lines, run = [], plan.undisturbed
    if plan.lacking:
        lines.append(f"Without a GPU, the script ended with: {plan.lacking}")
    if calls := translated(plan):
        shown = calls if everything else calls[:MANY]
        more = f" and {len(calls) - MANY} more (--all)" if len(calls) > len(shown) else ""
        lines.append(f"Translated for the CPU: {', '.join(shown)}{more}")
    left = run.all(events.Leave)
    text = "Changed: destroy_process_group waits 50 ms"
    if any(event.models for event in left) and not run.for_nccl:
        text += ". Without it, a model that is freed later, as here, can hang in rare cases"
        text += " (pitfalls/handler_holds_model.md)"
    return [*lines, text] if left else lines


def translated(plan):
    calls = plan.undisturbed.all(events.Translated)
    return list(dict.fromkeys(f"{call.call} ({short(call.where)})" for call in calls))


def split(where):
    """Return the file and the line number of "file:line", or None for each."""
    path, _, number = where.rpartition(":")
    return (path, int(number)) if path else (None, None)


def json_of(plan, verdicts):
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
    shown = [one for one in ranked(verdicts) if one[1].status in LEVELS]
    return "\n".join(annotation(plan.path, *one) for one in shown)


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
