"""Check a distributed training script: run it on the CPUs of this machine, watched from the inside.

The script is run as it is, over gloo, in a temporary folder that holds the files of this one.
Each rule says pass, FAIL, not seen (the run did not show it) or not applicable. A drill runs the
script several times, interrupts it, and compares the weights. The exit code is 1 if anything fails.

  python tests/check.py train.py
  python tests/check.py --nproc 3 train.py --epochs 2
  python tests/check.py --drill kill --drill sigterm --drill world-size train.py
"""

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from itertools import starmap
from pathlib import Path

from check_drills import DRILLS
from check_rules import BROKEN, FAIL, NONE, PASS, PITFALLS, RULES, UNSEEN, Verdict
from check_run import LAUNCHERS, Plan


def line(title, verdict):
    """Return a verdict as one line of the report, or two."""
    text = f"{verdict.status:<15} {title}: {verdict.text}"
    if verdict.where and verdict.status != NONE:
        text += f" ({verdict.where})"
    if verdict.status == FAIL and verdict.pitfall:
        text += f"\n{'':<15} see {PITFALLS}#pitfall-{verdict.pitfall}"
    return text


def conclude(name, verdicts):
    """Return what a reader may rely on after a drill."""
    _, promise = DRILLS[name]
    worst = {verdict.status for _, verdict in verdicts}
    if FAIL in worst:
        return f"{name}: do not rely on it: {promise}"
    return f"{name}: {'you may rely on it' if worst == {PASS} else 'not shown'}: {promise}"


def judge(run):
    """Return the verdict of each rule: [(title, verdict)]."""
    return [(rule.__doc__, rule(run)) for rule in RULES]


def perform(name, plan):
    """Return the verdicts of a drill: [(title, verdict)]."""
    try:
        verdicts = DRILLS[name][0](plan)
    except Exception as error:  # a drill that cannot be judged must not end the report
        verdicts = [("the drill", Verdict(UNSEEN, f"{BROKEN}: {error!r}"))]
    return [(f"{name}: {title}", verdict) for title, verdict in verdicts]


@contextlib.contextmanager
def planned(script, *options):
    """Run a script in temporary folders."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Plan(script, *options, folder)


def check(script, arguments=(), nproc=2, timeout=300, launcher=None):
    """Run a script and return its Run and the verdicts of all rules: [(title, verdict)]."""
    with planned(script, arguments, nproc, timeout, launcher) as plan:
        return plan.undisturbed, judge(plan.undisturbed)


def drill(name, script, arguments=(), nproc=2, timeout=300, launcher=None):
    """Run a drill and return its verdicts: [(title, verdict)]."""
    with planned(script, arguments, nproc, timeout, launcher) as plan:
        return perform(name, plan)


def report(plan, drills=()):
    """Run a script and the drills; print all verdicts, and return them."""
    verdicts = judge(plan.undisturbed)
    print("\n".join(starmap(line, verdicts)), flush=True)
    for name in drills:
        found = perform(name, plan)
        print("\n".join(["", *starmap(line, found), conclude(name, found)]), flush=True)
        verdicts += found
    calls = [f"{event['call']} ({event['where']})" for event in plan.undisturbed.all("translated")]
    if plan.lacking:
        print(f"\nWithout a GPU, the script ended with: {plan.lacking}")
    if calls:
        print("\nTranslated for the CPU:", ", ".join(dict.fromkeys(calls)))
    count = Counter(verdict.status for _, verdict in verdicts)
    print("\n" + ", ".join(f"{number} {status}" for status, number in count.items()))
    return verdicts


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="processes (2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run (300)")
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="what starts the script; python: it starts its processes itself (what its text needs)",
    )
    parser.add_argument(
        "--drill", action="append", choices=DRILLS, default=[], help="also run this (repeatable)"
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"there is no {args.script}")
    args.arguments = args.arguments[args.arguments[:1] == ["--"] :]
    return args


def main():
    args = parse_args()
    with planned(args.script, args.arguments, args.nproc, args.timeout, args.launcher) as plan:
        verdicts = report(plan, args.drill)
    sys.exit(any(verdict.status == FAIL for _, verdict in verdicts))


if __name__ == "__main__":
    main()
