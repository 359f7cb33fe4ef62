"""The report on what a run and its drills have shown, and the exit code."""

import textwrap
from collections import Counter

from ddp_check import events
from ddp_check.drills import DRILLS, conclude
from ddp_check.ranks import counted, short
from ddp_check.rules import base

SUMMARIES = ("nothing wrong", "wrong", "no verdict")  # summary for each exit code
ROOMS = "more/"  # folder of this repository in which pitfalls/, recipes/ and lookup/ are
WIDTH, INDENT = 80, 9  # number of columns of the report, and of the labels on its left
CENTRAL = {  # rules that a reader of "nothing wrong" relies on -> what they check
    "weights_agree": "all ranks have the same weights",
    "gradients_are_averaged": "each step takes the mean gradient",
    "ranks_share_data": "the ranks share out the data",
    "order_changes": "the order changes from epoch to epoch",
    "each_sample_is_evaluated_once": "each sample is evaluated once",
}


def exit_code(plan, verdicts):
    """Return 0 if nothing is wrong, 1 if something is, 2 if the checker cannot tell."""
    statuses, run = {verdict.status for verdict in verdicts}, plan.undisturbed
    if base.WRONG in statuses:
        return 1
    ended = not any(each.rule == "script_ends" and each.status == base.UNSURE for each in verdicts)
    return 0 if ended and run.all(events.Step) and base.BROKEN not in statuses else 2


def summary(plan, verdicts):
    """Return the verdict on the script in a few words."""
    code, run = exit_code(plan, verdicts), plan.undisturbed
    if broken := [verdict.rule for verdict in verdicts if verdict.status == base.BROKEN]:
        return f"{SUMMARIES[code]}, and the checker itself failed in {', '.join(broken)}"
    if code == 0 and any(verdict.status == base.UNSURE for verdict in verdicts):
        return "nothing is proven wrong"
    if code == 0 and central_and_unseen(verdicts):
        return "nothing wrong in what was seen"
    return "no training was seen" if code == 2 and run.returncode == 0 else SUMMARIES[code]


def central_and_unseen(verdicts):
    """Return descriptions of the drills and central rules that have seen nothing."""
    unseen = [verdict for verdict in verdicts if verdict.status == base.UNSEEN]
    drills = [DRILLS[verdict.rule].__doc__ for verdict in unseen if verdict.rule in DRILLS]
    central = [verdict for verdict in unseen if verdict.rule in CENTRAL]
    return drills + [f"{CENTRAL[verdict.rule]} ({verdict.text})" for verdict in central]


def message(verdict):
    """Return a verdict in words, in one line."""
    kind = f"{verdict.status}: " if verdict.status in (base.FRAGILE, base.SLOW) else ""
    has_line = verdict.where and (verdict.status in base.LEVELS or verdict.status == base.UNSEEN)
    line = f" ({short(verdict.where)})" if has_line else ""
    return f"{kind}{verdict.title}: {verdict.text}{line}"


def page_of(verdict):
    """Return the path in this repository of the page that explains a verdict, or ""."""
    if not verdict.page:
        return ""
    return f"{ROOMS}{verdict.page if '/' in verdict.page else f'pitfalls/{verdict.page}'}.md"


def wrapped(text, label=""):
    """Return a text after a label, wrapped into lines of at most 80 columns."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{label:<{INDENT}}" if label else "",
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def lines_of(verdict):
    """Return the lines of the report about one verdict."""
    lines = [wrapped(message(verdict), base.LABELS[verdict.status][0])]
    if verdict.status in base.LEVELS:
        page = page_of(verdict)
        lines += [f"{'':{INDENT}}see {page}"] if page else []
        lines += [f"{'':{INDENT}}| {detail}" for detail in verdict.details[-8:]]
    return "\n".join(lines)


def ranked(verdicts):
    """Return the verdicts in the order of the report.

    Faults and the results of drills come first, then warnings that only follow from a fault, then
    the rest. Within each group, the worst come first; of equally bad ones, causes come first.
    """
    order = [*base.LABELS]

    def position(verdict):
        is_quiet = verdict.status not in base.LEVELS and verdict.rule not in DRILLS
        is_late_warning = verdict.follows and verdict.status != base.WRONG
        return is_quiet, is_late_warning, order.index(verdict.status), verdict.follows

    return sorted(verdicts, key=position)


def text_of(plan, verdicts, drills=(), everything=False):
    """Return the report. It begins with the summary, the reasons for it, and what was run."""
    run, verdicts = plan.undisturbed, ranked(verdicts)
    counts = Counter(verdict.status for verdict in verdicts)
    numbers = ", ".join(f"{counts[status]} {status}" for status in base.LABELS if counts[status])
    where = "its GPU calls translated for the CPU" if run.translate else "on the CPU"
    quiet = [each for each in verdicts if each.status in base.FOLDED and each.rule not in DRILLS]
    folded = [] if everything else quiet
    lines = [
        wrapped(f"{plan.script}: {summary(plan, verdicts)}: {numbers}"),
        *map(wrapped, reasons(plan, verdicts)),
        wrapped(f"ran: {plan.nproc} processes under {plan.launcher}, {where}, {run.seconds:.0f} s"),
        "",
        *(lines_of(verdict) for verdict in verdicts if verdict not in folded),
    ]
    if folded:
        rules = counted(len(folded), "rule")
        lines.append(wrapped(f"{rules} had nothing to look at; --all says why", "not seen"))
    conclusions = [
        conclude(name, [verdict for verdict in verdicts if verdict.rule == name]) for name in drills
    ]
    return "\n".join([*lines, "", *map(wrapped, conclusions + changes(plan))]).rstrip("\n")


def reasons(plan, verdicts):
    """Return the lines that say what was not seen, or why there is no verdict."""
    code, has_faults = exit_code(plan, verdicts), verdicts[0].status in base.LEVELS
    if code == 2 and not has_faults:
        text = "no optimizer of torch.optim took a step, so it says little that rules pass: "
        return [f"{text}does the script change its weights by hand?"]
    if code == 0 and (not_seen := central_and_unseen(verdicts)):
        return [f"not seen: {'; '.join(not_seen)}"]
    return []


def changes(plan):
    """Return sentences about what the checker changed for the run, and about its own faults."""
    texts, run = [], plan.undisturbed
    if plan.lacking:
        texts.append(f"Without a GPU, the script ended with: {plan.lacking}")
    if plan.with_checkpoints:
        texts.append("The checkpoints beside the script are used: without them, it fails.")
    for event in run.all(events.Trouble):
        texts.append(f"A fault of the checker, which the script has not noticed: {event.error}")
    return list(dict.fromkeys(texts))
