"""The verdicts that rules and drills give, and how they give them.

A *rule* is a function of a run. Its docstring is its title: the sentence that is true of a right
script. It returns a verdict, or None, which passes with a count of what it has looked at:

    def clipping_sees_gradients(run):
        "gradients are clipped when no scale is in them"
        for event in run.all(events.Clipped):
            if event.scaled:
                return wrong("the scaler's factor is in them: call unscale_ first", event.where)

It gets its line in the table `RULES`, beside the events without which it has nothing to look at.
`run.all(kind)` gives the events of a kind from all ranks, and `run.by_rank(kind)` gives them as
{rank: events}. A rule that raises an exception is reported as an error of the checker.

A *drill* is a generator, for it runs the script again, and each run may show several things. It
yields pairs of a title and a verdict:

    def kill(plan):
        "a killed rank costs no saved step"
        interrupted = plan.run("interrupted", during=kill_a_rank)
        yield "it resumes", passed("12 steps, then 20")

Whether a verdict is *wrong*, *fragile*, *slow* or *unsure* is said beside these words below. A rule
passes only for what it has looked at; what a run did not show is `unseen`.
"""

from dataclasses import dataclass
from functools import partial

PASS, UNSEEN, NONE = "pass", "not seen", "not applicable"
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
    NONE: ("n/a", ""),
}
LEVELS = {status: level for status, (_, level) in LABELS.items() if level}
FOLDED = (UNSEEN, NONE)  # what a report shows in one line


@dataclass
class Verdict:
    status: str
    text: str  # what was seen
    where: str = ""  # the line of the script, as "file:line"
    page: str = ""  # that explains it, in pitfalls/ or with its folder
    details: tuple = ()  # lines to show beneath it
    rule: str = ""  # the name of the rule or drill that gives it
    title: str = ""  # what it is about
    follows: bool = False  # from what another rule says, or after all work is done


passed, wrong, unsure = (partial(Verdict, status) for status in (PASS, WRONG, UNSURE))
fragile, slow, note = (partial(Verdict, status) for status in (FRAGILE, SLOW, NOTE))
unseen, not_applicable = partial(Verdict, UNSEEN), partial(Verdict, NONE)
