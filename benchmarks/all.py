"""Measure everything that README.md shows, and write it there.

    python benchmarks/all.py            measure (about 50 minutes on two idle cores), then write
    python benchmarks/all.py --tables   only write the tables again, from the files in figures/

The tables are in README.md, between <!-- measured: FILE --> and <!-- end -->.
"""

import argparse
import json
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
PYTHON = [sys.executable]
BUCKETS = "breakdown.py --width=128 --batch-size=8 --bucket-mb=0.25"
COMMANDS = (
    (PYTHON, "peers.py"),
    (PYTHON, "lines.py"),
    (PYTHON, "lines.py --batch-size=32"),
    (launcher(2), "breakdown.py"),
    (launcher(2), BUCKETS),
    (launcher(4), BUCKETS),
    (launcher(2), "by_hand.py"),
    (launcher(4), "by_hand.py"),
    (PYTHON, "scaling.py --processes=4"),
    (PYTHON, "learning_rate.py"),
)


def measure():
    """Run all commands; they write their files into FIGURES."""
    for start, command in COMMANDS:
        print(f"\n{command}", flush=True)
        name, *words = command.split()
        subprocess.run([*start, HERE / name, *words], cwd=FIGURES, check=True)
    for trace in FIGURES.glob("trace-*.json"):  # megabytes, and not needed for the page
        trace.unlink()


def read(name):
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def shown(found):
    """Return the report of the program that wrote a file, and on what it ran."""
    heading, name = found.groups()
    record = read(name)
    words = "Measured on {date}, {cores} cores ({cpu}), torch {torch}.".format(**record["machine"])
    report = import_module(name.partition("-")[0]).report
    return f"{heading}{report(record)}\n\n{words}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="do not measure")
    if not parser.parse_args().tables:
        measure()
    page = PAGE.read_text(encoding="utf-8")
    page = re.sub(r"(<!-- measured: (\S+) -->\n).*?(?=<!-- end -->)", shown, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")
    records = {str(n): read(f"timeline-{n}") for n in (2, 4)}
    drawn = {"written_by": "benchmarks/all.py", "records": records}
    DATA.write_text(json.dumps(drawn, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
