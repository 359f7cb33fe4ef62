"""The verdicts that rules and drills give."""

from dataclasses import dataclass
from functools import partial

PASS, UNSEEN, NONE = "pass", "not seen", "not applicable"
WRONG = "wrong"  # the result is wrong, or the run fails
FRAGILE = "fragile"  # it works until something else goes wrong
SLOW = "slow"  # it is right, and costs time
UNSURE = "unsure"  # something was seen that may be wrong, and the checker cannot decide
BROKEN = "error"  # the checker itself failed


@dataclass
class Verdict:
    status: str
    text: str
    where: str = ""  # the line of the script
    page: str = ""  # the pitfall that explains it
    details: tuple = ()  # lines to show beneath it
    follows: bool = False  # it is the consequence of what another rule says


passed, wrong, unsure = (partial(Verdict, status) for status in (PASS, WRONG, UNSURE))
fragile, slow = partial(Verdict, FRAGILE), partial(Verdict, SLOW)
unseen, not_applicable = partial(Verdict, UNSEEN), partial(Verdict, NONE)
