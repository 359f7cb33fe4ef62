"""Check a distributed training script: run it on the CPUs of this machine, watched from the inside.

The script is run as it is, over gloo, in a temporary folder with links to the files of this one.
Each rule says pass, FAIL, not seen (the run did not show it) or not applicable. A drill runs the
script several times, interrupts it, and compares the weights. The exit code is 1 if anything fails.

  python tests/check.py train.py
  python tests/check.py --nproc 3 train.py --epochs 2
  python tests/check.py --drill kill --drill sigterm --drill world-size train.py
"""

import argparse
import sys
import tempfile
from collections import Counter
from itertools import starmap
from pathlib import Path

from check_drills import DRILLS
from check_rules import FAIL, NONE, PASS, PITFALLS, RULES
from check_run import Plan


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


def check(script, arguments=(), nproc=2, timeout=300):
    """Run a script and return its Run and the verdicts of all rules: [(title, verdict)]."""
    with tempfile.TemporaryDirectory() as folder:
        run = Plan(script, arguments, nproc, timeout, folder).run("plain")
        return run, judge(run)


def drill(name, script, arguments=(), nproc=2, timeout=300):
    """Run a drill and return its verdicts: [(title, verdict)]."""
    run, _ = DRILLS[name]
    with tempfile.TemporaryDirectory() as folder:
        verdicts = run(Plan(script, arguments, nproc, timeout, folder))
        return [(f"{name}: {title}", verdict) for title, verdict in verdicts]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="processes (2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run (300)")
    parser.add_argument("--drill", action="append", choices=DRILLS, default=[], help="repeatable")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"there is no {args.script}")
    arguments = args.arguments[args.arguments[:1] == ["--"] :]
    options = args.script, arguments, args.nproc, args.timeout
    run, verdicts = check(*options)
    print("\n".join(starmap(line, verdicts)), flush=True)
    for name in args.drill:
        found = drill(name, *options)
        print("\n".join(["", *starmap(line, found), conclude(name, found)]), flush=True)
        verdicts += found
    calls = [f"{event['call']} ({event['where']})" for event in run.all("translated")]
    if calls:
        print("\nTranslated for the CPU:", ", ".join(dict.fromkeys(calls)))
    count = Counter(verdict.status for _, verdict in verdicts)
    print("\n" + ", ".join(f"{number} {status}" for status, number in count.items()))
    sys.exit(count[FAIL] > 0)


if __name__ == "__main__":
    main()
