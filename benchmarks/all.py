"""Measure everything that README.md shows, and write it there.

    python benchmarks/all.py            measure (about 40 minutes on two idle cores), then write
    python benchmarks/all.py --tables   only write the tables again, from the files in figures/

The tables are in README.md, between <!-- measured: FILE --> and <!-- end -->.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from shared import launcher

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
FIGURES = HERE / "figures"
DATA = HERE.parent / "diffs" / "figures" / "where-the-time-goes.json"  # of a figure on diffs' page
BUCKETS = "breakdown.py --width=128 --batch-size=8 --bucket-mb=0.25"
COMMANDS = (  # the number of ranks, if torchrun starts them, and the command
    (None, "peers.py"),
    (None, "lines.py --seconds=60"),
    (2, "lines.py --seconds=120"),
    (2, "lines.py --seconds=60 --batch-size=32"),
    (2, "breakdown.py"),
    (2, BUCKETS),
    (4, BUCKETS),
    (2, "communication.py"),
    (None, "scaling.py --processes=4 --repeats=2 --epochs=3"),
    (None, "learning_rate.py"),
    (None, "growth.py"),
)


def measure(folder):
    """Run all commands in a folder, into which they write their files."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for ranks, command in COMMANDS:
        name, *words = command.split()
        print(f"\n{command}" + (f", {ranks} ranks" if ranks else ""), flush=True)
        start = launcher(ranks) if ranks else [sys.executable]
        subprocess.run([*start, HERE / name, *words], cwd=folder, env=env, check=True)
    for trace in folder.glob("trace-*.json"):  # megabytes, and not needed for the page
        trace.unlink()


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def drawn(folder):
    """Return the data of the figure on diffs' page: the recorded steps."""
    records = {str(n): read(folder, f"timeline-{n}") for n in (2, 4)}
    return {"written_by": "benchmarks/all.py", "records": records}


def shown(folder, name):
    """Return the report of the program that wrote a file, and on what it ran."""
    program = name.partition("-")[0]
    if not (folder / f"{name}.json").exists():
        return f"Not measured yet: `python benchmarks/{program}.py`."
    record = read(folder, name)
    words = "Measured on {date}, {cores} cores ({cpu}), torch {torch}.".format(**record["machine"])
    return f"{import_module(program).report(record)}\n\n{words}"


def filled(text, folder):
    """Return the page with its tables filled in from the files in a folder."""
    return re.sub(
        r"(<!-- measured: (\S+) -->\n).*?(?=<!-- end -->)",
        lambda found: f"{found[1]}{shown(folder, found[2])}\n",
        text,
        flags=re.DOTALL,
    )


def parse_args():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--tables", action="store_true", help="do not measure")
    return parser.parse_args()


def main():
    args = parse_args()
    if not args.tables:
        measure(FIGURES)
    page = filled(PAGE.read_text(encoding="utf-8"), FIGURES)
    PAGE.write_text(page, encoding="utf-8")
    DATA.write_text(json.dumps(drawn(FIGURES), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
