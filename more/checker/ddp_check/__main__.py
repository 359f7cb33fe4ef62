"""Check a distributed training script by running it under observation on this machine's CPUs.

  ddp-check train.py
  ddp-check --nproc 3 --drill kill --drill world-size train.py --epochs 2
  ddp-check -m package.train --epochs 2

exit code: 0: nothing is wrong; 1: something is; 2: the script could not be run here
"""

import argparse
import shlex
import signal
import sys
import traceback
from pathlib import Path

try:
    from ddp_check import __version__, report
    from ddp_check.drills import DRILLS, perform
    from ddp_check.plan import LAUNCHERS, module_path, planned
    from ddp_check.rules import judge
except ModuleNotFoundError as error:
    print(f"ddp-check: {error.name} is missing here: pip install {error.name}", file=sys.stderr)
    sys.exit(2)
USAGE = """ddp-check [options] script [arguments]    (--help shows the options)
       ddp-check --drill kill train.py --epochs 2"""
SHOWN = ("drill", "all")  # options that do not change how the script is run


def option_parser():
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ddp-check",
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="number of processes (2)")
    add("--timeout", type=float, default=300, help="seconds for each run (300)")
    add("--launcher", choices=LAUNCHERS, help="how to start the script (chosen by its text)")
    add("--translate", choices=["auto", "yes", "no"], default="auto", help="GPU calls (auto)")
    add("--drill", action="append", choices=DRILLS, default=[], help="also run this (repeatable)")
    add("--restart-args", metavar="'…'", type=shlex.split, help="write =: they may begin with -")
    add("--all", action="store_true", help="also say why something was not seen")
    add("--version", action="version", version=f"ddp-check {__version__}")
    add("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    add("script")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def parse_args():
    """Return the options that were given on the command line."""
    parser = option_parser()
    args = parser.parse_args()
    path = module_path(args.script) if args.module else Path(args.script)
    if not path.is_file():
        parser.error(f"there is no {path}")
    return args


def main():
    """Run the command. If the checker itself fails, exit with code 2 instead of Python's 1."""
    try:
        check(parse_args())
    except Exception:
        traceback.print_exc()
        print("ddp-check itself failed, which says nothing about the script", file=sys.stderr)
        sys.exit(2)


def check(args):
    """Run the script and the drills, print the report, and exit."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # `ddp-check … | head` sends SIGPIPE
        signal.signal(number, signal.SIG_DFL)  # end silently; keeper.py then cleans up
    how = {name: value for name, value in vars(args).items() if name not in SHOWN}
    with planned(**how) as plan:
        print(f"ddp_check: {plan.nproc} processes, {plan.launcher}", *args.drill, file=sys.stderr)
        verdicts = judge(plan.undisturbed)
        for name in args.drill:
            verdicts += perform(name, plan)
        print(report.text_of(plan, verdicts, args.drill, args.all))
    sys.exit(report.exit_code(plan, verdicts))


if __name__ == "__main__":
    main()
