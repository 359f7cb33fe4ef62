"""Check a distributed training script: run it on the CPUs of this machine, watched from the inside.

The script is run as it is, over gloo, in a temporary folder that holds the files of this one.
Each rule says pass, FAIL, not seen (the run did not show it) or not applicable. A drill runs the
script several times, interrupts it, and compares the weights. The exit code is 1 if anything fails.

  python -m ddp_check train.py
  python -m ddp_check --nproc 3 train.py --epochs 2
  python -m ddp_check --drill kill --drill sigterm --drill world-size train.py
"""

import argparse
import sys
from pathlib import Path

from ddp_check.drills import DRILLS
from ddp_check.report import planned, report
from ddp_check.rules import FAIL
from ddp_check.run import LAUNCHERS


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m ddp_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
