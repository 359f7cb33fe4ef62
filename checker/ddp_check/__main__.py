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
from pathlib import Path

try:
    from ddp_check.drills import DRILLS
    from ddp_check.plan import LAUNCHERS, module_path
    from ddp_check.report import annotations, exit_code, json_of, perform, planned, text_of
    from ddp_check.rules import judge
except ModuleNotFoundError as error:
    print(f"ddp-check: {error.name} is missing here: pip install {error.name}", file=sys.stderr)
    sys.exit(2)
USAGE = """ddp-check [options] script [arguments]    (--help shows the options)
       ddp-check --drill kill train.py --epochs 2"""


def parse_args():
    options = argparse.ArgumentParser(
        prog="ddp-check",
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--nproc", type=int, default=2, help="number of processes (2)")
    add("--timeout", type=float, default=300, help="seconds for each run (300)")
    add("--launcher", choices=LAUNCHERS, help="how to start the script (chosen by its text)")
    add("--translate", choices=["auto", "yes", "no"], default="auto", help="GPU calls (auto)")
    add("--env", metavar="NAME=VALUE", action="append", default=[])
    add("--drill", action="append", choices=DRILLS, default=[], help="also run this (repeatable)")
    add("--restart-args", metavar="'…'", type=shlex.split, help="follow the others on a restart")
    add("--all", action="store_true", help="also say why something was not seen")
    add("--output", action="store_true", help="then show all that the script printed")
    add("--format", choices=["text", "json", "github"], default="text", help="(text)")
    add("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    add("script")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    words = sys.argv[1:]
    if "--restart-args" in words[:-1]:  # its value begins with a hyphen: argparse wants them joined
        at = words.index("--restart-args")
        words[at : at + 2] = ["=".join(words[at : at + 2])]
    args = options.parse_args(words)
    path = module_path(args.script) if args.module else Path(args.script)
    bad = [f"{one} is not NAME=VALUE" for one in args.env if "=" not in one]
    if bad or not path.is_file():
        options.error(next(iter(bad), f"there is no {path}"))
    args.env = dict(one.split("=", 1) for one in args.env)
    return args


def main():
    args = parse_args()
    for number in (signal.SIGINT, signal.SIGPIPE):  # as in `ddp-check train.py | head`
        signal.signal(number, signal.SIG_DFL)  # end at once, silently: the keeper cleans up
    shown = ("drill", "all", "output", "format")
    with planned(**{name: of for name, of in vars(args).items() if name not in shown}) as plan:
        print(f"ddp_check: {plan.nproc} processes, {plan.launcher}", *args.drill, file=sys.stderr)
        verdicts = judge(plan.undisturbed) + [one for of in args.drill for one in perform(of, plan)]
        as_json = args.format == "json"
        print(json_of(plan, verdicts) if as_json else text_of(plan, verdicts, args.all))
        if args.format == "github":
            print(annotations(plan, verdicts))
        if args.output:
            text = f"\nThe script printed:\n{plan.undisturbed.output}"
            print(text, file=sys.stderr if as_json else sys.stdout)
    sys.exit(exit_code(plan, verdicts))


if __name__ == "__main__":
    main()
