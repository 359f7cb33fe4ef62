"""The verdicts on a script, and the report that shows them."""

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from ddp_check import events
from ddp_check.drills import DRILLS
from ddp_check.keeper import kept_folder
from ddp_check.plan import Plan
from ddp_check.ranks import short
from ddp_check.rules import base

SUMMARIES = ("nothing wrong", "wrong", "no verdict")  # by exit code


@contextlib.contextmanager
def planned(script, arguments=(), nproc=2, timeout=300, launcher=None, **options):
    with kept_folder() as folder:
        yield Plan(script, arguments, nproc, timeout, launcher, folder, **options)


def perform(name, plan):
    """Return the verdicts of a drill."""
    try:
        verdicts = list(DRILLS[name](plan))
    except Exception as error:  # a drill that breaks must not cost the whole report
        verdicts = [("the drill", base.Verdict(base.BROKEN, repr(error)))]
    return [replace(one, rule=name, title=f"{name}: {title}") for title, one in verdicts]


def exit_code(plan, verdicts):
    """Return 0 if nothing is wrong, 1 if something is, 2 if that could not be seen."""
    found, run = {verdict.status for verdict in verdicts}, plan.undisturbed
    if base.WRONG in found:
        return 1
    seen = run.returncode == 0 and run.all(events.Step) and base.BROKEN not in found
    return 0 if seen else 2


def summary(plan, verdicts):
    code = exit_code(plan, verdicts)
    if broken := [verdict.rule for verdict in verdicts if verdict.status == base.BROKEN]:
        return f"{SUMMARIES[code]}, and the checker itself failed in {', '.join(broken)}"
    idle = code == 2 and plan.undisturbed.returncode == 0
    return "no training was seen" if idle else SUMMARIES[code]


def message(verdict):
    kind = f"{verdict.status}: " if verdict.status in (base.FRAGILE, base.SLOW) else ""
    at = f" ({short(verdict.where)})" if verdict.where and verdict.status != base.NONE else ""
    return f"{kind}{verdict.title}: {verdict.text}{at}"


def line(verdict):
    lines = [f"{base.LABELS[verdict.status][0]:<8} {message(verdict)}"]
    if verdict.status in base.LEVELS:
        page = verdict.page if "/" in verdict.page else f"pitfalls/{verdict.page}"
        lines += [f"{'':<8} see {page}.md"] if verdict.page else []
        lines += [f"{'':<8} | {text}" for text in verdict.details[-8:]]
    return "\n".join(lines)


def conclude(name, verdicts):
    """Return a line that says whether the promise of a drill holds, and if not, why."""
    found = [one for one in verdicts if one.status not in (base.FRAGILE, base.PASS)]
    holds = f"not shown ({found[0].text})" if found else "you may rely on it"
    if any(one.status == base.WRONG for one in found):
        holds = "do not rely on it"
    return f"{name}: {holds}: {DRILLS[name].__doc__}"


def ranked(verdicts):
    """Return the verdicts, the worst first, causes before what follows from them or comes later."""

    def rank(one):
        later = one.follows and one.status != base.WRONG
        return one.status not in base.LEVELS, later, [*base.LABELS].index(one.status), one.follows

    return sorted(verdicts, key=rank)


def text_of(plan, verdicts, everything=False):
    """Return the report: first the verdict, its first reason, and what was run."""
    run, counts = plan.undisturbed, Counter(verdict.status for verdict in verdicts)
    found = ", ".join(f"{counts[status]} {status}" for status in base.LABELS if counts[status])
    first, *_ = verdicts = ranked(verdicts)
    reason = f"all {counts[base.PASS]} rules that saw something pass"
    reason = f"first: {message(first)}" if first.status in base.LEVELS else reason
    where = "its GPU calls translated for the CPU" if run.translate else "on the CPU"
    ran = f"ran: {plan.nproc} processes under {plan.launcher}, {where}, {run.seconds:.0f} s"
    lines = [f"{plan.script}: {summary(plan, verdicts)}: {found}", reason, ran, ""]
    lines += [line(one) for one in verdicts if everything or one.status not in base.FOLDED]
    folded = {one.rule: None for one in verdicts if one.status in base.FOLDED}
    if folded and not everything:
        lines.append(f"not seen: {', '.join(folded)} (--all says why)")
    drilled = {name: [one for one in verdicts if one.rule == name] for name in DRILLS}
    lines += ["", *(conclude(name, of) for name, of in drilled.items() if of)]
    return "\n".join([*lines, *changes(plan)]).rstrip("\n")


def changes(plan):
    """Return lines that say what the checker did that the script would not have done."""
    lines, run = [], plan.undisturbed
    if plan.lacking:
        lines.append(f"Without a GPU, the script ended with: {plan.lacking}")
    if calls := translated(plan):
        lines.append(f"Translated for the CPU: {', '.join(calls)}")
    if left := run.all(events.Leave):
        lines.append("Changed: destroy_process_group waits 50 ms")
    if any(event.live_wrappers for event in left) and not run.for_nccl:
        lines[-1] += ". Without it, a model that is freed later, as here, can hang in rare cases"
        lines[-1] += " (pitfalls/handler_holds_model.md)"
    return lines


def translated(plan):
    calls = plan.undisturbed.all(events.Translated)
    return list(dict.fromkeys(f"{call.call} ({short(call.where)})" for call in calls))


def json_of(plan, verdicts):
    found = {"script": str(plan.script), "verdict": summary(plan, verdicts)}
    found |= {"exit_code": exit_code(plan, verdicts), "processes": plan.nproc}
    found |= {"launcher": plan.launcher, "seconds": round(plan.undisturbed.seconds, 1)}
    found |= {"translated": translated(plan), "results": list(map(asdict, verdicts))}
    return json.dumps(found, indent=2)


def annotations(plan, verdicts):
    """Return GitHub's commands that show the verdicts beside the lines of the script."""
    lines, top = [], os.environ.get("GITHUB_WORKSPACE") or Path.cwd()  # of the paths
    for one in ranked(verdicts):
        path, _, number = one.where.rpartition(":")
        file, title = os.path.relpath(path or plan.path, top), escaped(one.title, ",:")
        place = f"file={escaped(file, ',:')},line={number or 1},title={title}"
        if level := base.LEVELS.get(one.status):
            lines.append(f"::{level} {place}::{escaped(one.text)}")
    return "\n".join(lines)


def escaped(text, more=""):
    """Return a text as GitHub's commands need it."""
    return text.translate({ord(one): f"%{ord(one):02X}" for one in f"%\r\n{more}"})
