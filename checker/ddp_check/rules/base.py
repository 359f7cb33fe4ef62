"""The verdicts that rules and drills give, and how to write a rule or a drill.

A *rule* is a function of a `Run` (run.py). Its docstring is its title: the sentence that is true of
a right script. It returns a verdict, or None if it found no fault:

    def clipping_comes_last(run):
        "gradients are clipped when no scale is in them"
        for event in run.all(events.Clipped):
            if event.scaled:
                return wrong("the scaler's factor is in them", event.where, "recipes/fp16_scaler")

1. What can be seen is listed in events.py. `run.all(kind)` gives the events of all ranks,
   `run.by_rank(kind)` gives {rank: events}, `run.of_lowest_rank(kind)` those of one rank, and
   `run.rows(kind)` a tuple of the ranks' events for each that all have. `run.step_rows` has the
   steps that all ranks took, `run.first_difference("rates")` the first one in which a field of
   `Step` differs, and `run.training_passes` has a {rank: pass} for each.
   To print the events of a script of yours:

       with planned("train.py") as plan:  # from plan.py
           print(*plan.undisturbed.all(events.Step), sep="\n")

2. Its row in `RULES` (rules/__init__.py) names the kinds of events that it needs. A run that lacks
   one of them is `unseen`, for the reason in `SUBJECTS`, and the rule is not called. If it returns
   None, it passes, with the number of events of the first kind. A rule that needs no kind has to
   return a verdict in any case.
3. A verdict is `wrong(text, where, page)`: what was seen, the line of the script, and the page that
   explains it. The words wrong, fragile, slow and unsure are explained beside `WRONG` below; what a
   longer run might still put right is `unsure`. A rule passes only for what it has looked at; what
   a run did not show is `unseen`. If no page of pitfalls/, recipes/ or lookup/ names the fault,
   leave the page out.
4. Its test is a row of `KINDS` in tests/test_ddp_check_kinds.py. `Kind(told, wrong, say, right)`
   has all that the report shows, the changes that make tests/base.py wrong, an expression that fits
   "text (line of the script)", and the changes that come before if another right script is needed.
   Begin with a copy of a row of your subject; what its changes are made of stands above the tables.
   A script that must only pass is a row of `RIGHT`. To run the row "never zeroed", for 10 s:
   `pytest -m "" checker/tests/test_ddp_check_kinds.py -k "never and zeroed"`
5. An event may leave cases out: look where the observer reports it, and who else reads it. If no
   event shows the fault: a property of each step is a field of `Step`, filled in `report_step`
   (observer/steps.py), or of `BetweenSteps`, filled wherever it is seen. What is needed to fill it
   is kept in `SinceStep`, which a step of any optimizer resets, or in `State` if it must last
   (observer/base.py). Anything else is a class in events.py, reported by a function under `@patch`
   in a module of observer/. Wrap the observer's own work in `with harmless():`, and pass on what
   you have read of an iterator. A step that a GradScaler skips is only seen in `step_scaled`.
6. It has to pass on 05_gather_eval.py, or to be named in `UNSHOWN` of tests/test_ddp_check.py. It
   gets a line in CHANGELOG.md under the version at its top, and changes the counts in the report
   that README.md shows. Then run `ruff`, `python diffs/generate.py`, and `.ci/budgets`, in which a
   rule may raise the rows of the checker. From a clone, `PYTHONPATH=checker python -m ddp_check`
   runs it.

A *drill* is a generator, for it runs the script again, and each run may show several things. It
yields pairs of a title and a verdict:

    def kill(plan):
        "a killed rank costs no saved step"
        interrupted = plan.run("interrupted", during=kill_a_rank(plan))
        yield "it resumes", passed("12 steps, then 20")

`during` is called while the script runs, with its process, the folder of its events, and the time
at which it will be killed. `CANNOT_DECIDE` (drills/__init__.py) asks the undisturbed run first.
"""

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
