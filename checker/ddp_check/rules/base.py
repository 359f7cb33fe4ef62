"""The verdicts that rules and drills give. CONTRIBUTING.md shows how to write a rule or a drill."""

from dataclasses import dataclass
from functools import partial

PASS, UNSEEN, NOT_APPLICABLE = "pass", "not seen", "not applicable"
WRONG = "wrong"  # the result is wrong, or the run fails
FRAGILE = "fragile"  # it works until something else goes wrong
SLOW = "slow"  # it is right, and costs time
UNSURE = "unsure"  # something was seen that may be wrong, and the checker cannot decide
NOTE = "note"  # rare or harmless: worth a line at the end
BROKEN = "error"  # the checker itself failed
LABELS = {  # status -> how its line in the report begins, and GitHub's level; the worst come first
    WRONG: ("FAIL", "error"),
    BROKEN: ("ERROR", "error"),
    FRAGILE: ("WARN", "warning"),
    SLOW: ("WARN", "warning"),
    UNSURE: ("unsure", "notice"),
    PASS: ("pass", ""),
    NOTE: ("note", ""),
    UNSEEN: ("not seen", ""),
    NOT_APPLICABLE: ("n/a", ""),
}
LEVELS = {status: level for status, (_, level) in LABELS.items() if level}
FOLDED = (UNSEEN, NOT_APPLICABLE)  # what a report shows in one line


@dataclass(frozen=True)
class Verdict:
    """What a rule or a drill says."""

    status: str  # one of the words above
    text: str  # what was seen
    where: str = ""  # the line of the script, as "file:line"
    page: str = ""  # that explains it: "no_sampler" is pitfalls/no_sampler.md; or "recipes/ema"
    details: tuple = ()  # lines to show beneath it
    rule: str = ""  # the name of the rule or drill that gives it
    title: str = ""  # what it is about
    follows: bool = False  # its cause is told by another rule: put it behind the others


passed, wrong, unsure = (partial(Verdict, status) for status in (PASS, WRONG, UNSURE))
fragile, slow, note = (partial(Verdict, status) for status in (FRAGILE, SLOW, NOTE))
unseen, not_applicable = partial(Verdict, UNSEEN), partial(Verdict, NOT_APPLICABLE)


def worst(verdicts):
    """Return the worst of these verdicts, of equally bad ones the first, or None without any."""
    order = [*LABELS]
    given = [verdict for verdict in verdicts if verdict]
    return min(given, key=lambda verdict: order.index(verdict.status), default=None)
