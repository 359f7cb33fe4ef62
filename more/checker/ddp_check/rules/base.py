"""The verdicts that rules and drills give. CONTRIBUTING.md shows how to write a rule."""

from dataclasses import dataclass
from functools import partial

PASS, UNSEEN, NOT_APPLICABLE = "pass", "not seen", "not applicable"
WRONG = "wrong"  # the result is wrong, or the run fails
FRAGILE = "fragile"  # the script works until something else goes wrong
SLOW = "slow"  # the result is right, but takes longer than necessary
UNSURE = "unsure"  # something may be wrong, but the checker cannot decide
BROKEN = "error"  # the checker itself failed
LABELS = {  # status -> label in the report, and level on GitHub; the worst status comes first
    WRONG: ("FAIL", "error"),
    BROKEN: ("ERROR", "error"),
    FRAGILE: ("WARN", "warning"),
    SLOW: ("WARN", "warning"),
    UNSURE: ("unsure", "notice"),
    PASS: ("pass", ""),
    UNSEEN: ("not seen", ""),
    NOT_APPLICABLE: ("n/a", ""),
}
LEVELS = {status: level for status, (_, level) in LABELS.items() if level}
FOLDED = (UNSEEN, NOT_APPLICABLE)  # statuses of verdicts that the report counts but does not show


@dataclass(frozen=True)
class Verdict:
    """What a rule or a drill has found."""

    status: str  # one of the constants above, such as WRONG
    text: str  # what was seen
    where: str = ""  # line of the script, as "file:line"
    page: str = ""  # page that explains it: "no_sampler" (pitfalls/no_sampler.md), "recipes/ema"
    details: tuple = ()  # lines to show below the verdict, such as a traceback
    rule: str = ""  # name of the rule or drill that gives the verdict
    title: str = ""  # what is true for a correct script: the docstring of the rule
    follows: bool = False  # whether another rule reports the cause; it then comes after its equals


passed, wrong, unsure = (partial(Verdict, status) for status in (PASS, WRONG, UNSURE))
fragile, slow = partial(Verdict, FRAGILE), partial(Verdict, SLOW)
unseen, not_applicable = partial(Verdict, UNSEEN), partial(Verdict, NOT_APPLICABLE)


def worst(verdicts):
    """Return the first of the worst of these verdicts, or None if there are none."""
    order = [*LABELS]
    given = [verdict for verdict in verdicts if verdict]
    return min(given, key=lambda verdict: order.index(verdict.status), default=None)
