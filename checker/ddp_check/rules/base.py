"""The verdicts that rules and drills give."""

from dataclasses import dataclass
from functools import partial

PASS, UNSEEN, NONE = "pass", "not seen", "not applicable"
WRONG = "wrong"  # the result is wrong, or the run fails
FRAGILE = "fragile"  # it works until something else goes wrong
SLOW = "slow"  # it is right, and costs time
UNSURE = "unsure"  # something was seen that may be wrong, and the checker cannot decide
BROKEN = "error"  # the checker itself failed
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
LEVELS = {status: level for status, (_, level) in LABELS.items() if level}
FOLDED = (UNSEEN, NONE)  # what a report shows in one line


@dataclass
class Verdict:
    status: str
    text: str  # what was seen
    where: str = ""  # the line of the script
    page: str = ""  # the pitfall that explains it
    details: tuple = ()  # lines to show beneath it
    rule: str = ""  # the name of the rule or drill that says it
    title: str = ""  # what it is about
    follows: bool = False  # from what another rule says, or after all work is done


passed, wrong, unsure = (partial(Verdict, status) for status in (PASS, WRONG, UNSURE))
fragile, slow = partial(Verdict, FRAGILE), partial(Verdict, SLOW)
unseen, not_applicable = partial(Verdict, UNSEEN), partial(Verdict, NONE)
