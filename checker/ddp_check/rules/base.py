"""What all rules use: verdicts, and how the ranks of a run are compared."""

from dataclasses import dataclass
from functools import partial

from ddp_check.events import Join, Step

PASS, UNSEEN, NONE = "pass", "not seen", "not applicable"
WRONG = "wrong"  # the result is wrong, or the run fails
FRAGILE = "fragile"  # it works until something else goes wrong
SLOW = "slow"  # it is right, and costs time
UNSURE = "unsure"  # something was seen that may be wrong, and the checker cannot decide
BROKEN = "error"  # the checker itself failed


@dataclass
class Verdict:
    """What a rule or a drill says about a run."""

    status: str
    text: str
    where: str = ""  # the line of the script
    page: str = ""  # the pitfall that explains it
    details: tuple = ()  # lines to show beneath it
    follows: bool = False  # it is the consequence of what another rule says


passed, wrong, unsure = (partial(Verdict, status) for status in (PASS, WRONG, UNSURE))
fragile, slow = partial(Verdict, FRAGILE), partial(Verdict, SLOW)
unseen, not_applicable = partial(Verdict, UNSEEN), partial(Verdict, NONE)


def differ(values):
    """Return the lowest rank and the first rank whose value differs from its own, or None."""
    (rank, value), *others = values.items()
    return next(((rank, other) for other, theirs in others if theirs != value), None)


def short(where):
    """Return a line of the script without its folder."""
    return where.rpartition("/")[2]


def counted(number, noun):
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def lowest(values):
    """Return the value of the lowest rank, or an empty list if there are no ranks."""
    return next(iter(values.values()), [])


def joined(run):
    """Return the `Join` events of each rank that joined a process group."""
    return {rank: found for rank, found in run.of(Join).items() if found}


def is_sharded(run):
    """Return whether the parameters are sharded, so no rank holds the full model."""
    return any(step.sharded for step in run.all(Step))


def step_rows(run):
    """Return the steps that all ranks took: a tuple of their events for each.

    Without the last one if the run failed: whether a rank reports the step of the failure, or is
    killed before, is a matter of chance. And none from the first that was taken in join().
    """
    rows = list(zip(*run.of(Step).values()))
    rows = rows[:-1] if run.returncode else rows
    end = next((at for at, row in enumerate(rows) if any(one.joined for one in row)), None)
    return rows[:end]


def first_difference(run, name):
    """Return the number and the row of the first step in which ranks differ, or (None, ())."""
    for number, row in enumerate(step_rows(run), 1):
        values = [getattr(step, name) for step in row]
        if any(value != values[0] for value in values):
            return number, row
    return None, ()


def first_infinite(run):
    """Return the number and the row of the first step with a number that is not finite."""
    rows = list(zip(*run.of(Step).values()))
    bad = (one for one in enumerate(rows, 1) if any(step.infinite for step in one[1]))
    return next(bad, (None, ()))


def name_of_first(run, row, name):
    """Return the name of the first parameter for which the ranks differ in a row of steps."""
    rank = next(iter(run.ranks))
    until = [one for one in run.of(Step)[rank] if one.time <= row[0].time and one.names]
    values = [getattr(step, name) for step in row]
    differs = next((at for at, of in enumerate(zip(*values)) if len(set(of)) > 1), None)
    return until[-1].names[differs] if until and differs is not None else "a parameter"
