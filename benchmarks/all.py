"""Measure everything that README.md shows, and write it there.

    python benchmarks/all.py            measure (about 25 minutes on two idle cores), then write
    python benchmarks/all.py --tables   only write the tables again, from the files in figures/

The tables are in README.md, between <!-- measured: NAME --> and <!-- end -->.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import breakdown
import learning_rate
import scaling
import timeline
from shared import cell, launcher, table

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
FIGURES = HERE / "figures"
DATA = HERE.parent / "diffs" / "figures" / "where-the-time-goes.json"  # of a figure on diffs' page
BUCKETS = "breakdown.py --width=128 --batch-size=8 --bucket-mb=0.25"
COMMANDS = (  # the number of ranks, if torchrun starts them, and the command
    (None, "lines.py --seconds=60"),
    (2, "lines.py --seconds=120"),
    (2, "lines.py --seconds=30 --batch-size=32 --baselines"),
    (2, "breakdown.py"),
    (2, BUCKETS),
    (4, BUCKETS),
    (2, "communication.py"),
    (3, "communication.py"),
    (None, "scaling.py --processes=4 --repeats=2 --epochs=3"),
    (None, "learning_rate.py"),
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


# ---------------------------------------------------------------- the tables


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def speeds(folder):
    """Return what lines.py found with one process, with two, and with two and a small batch.

    Each is {(name, against): a ratio}.
    """
    records = [read(folder, f"lines-{name}") for name in ("1-of-128", "2-of-128", "2-of-32")]
    return [{(row["name"], row["against"]): row for row in each["ratios"]} for each in records]


def row(name, against, columns):
    """Return the cells of a row: the ratio in each column, or nothing where it is not measured."""
    return [cell(found[name, against]) if (name, against) in found else "" for found in columns]


# Each function below returns the table of the same name.


def measured_on(folder):
    machine = read(folder, "lines-2-of-128")["machine"]
    version = machine["torch"].split("+")[0]
    return (
        "Measured on {date}: {cores} cores ({cpu}) of a virtual machine, Python {python}, "
        "torch {version}, gloo."
    ).format(**machine, version=version)


def baselines(folder):
    columns = speeds(folder)
    heading = ("samples/s of", "relative to", "one process", "two, batch 128", "two, batch 32")
    pairs = [("01", "bare loop"), *columns[2], ("evaluation by 05", "evaluation by copies of 01")]
    share = cell(columns[1]["a save", "05"], ".1%")
    save = ("time of a save", "an epoch of about a second", "", share, "")
    return table(heading, *((*pair, *row(*pair, columns)) for pair in pairs), save)


def lines(folder):
    one, two, _ = speeds(folder)
    names = [name for name, against in two if against == "05" and name != "a save"]
    rows = [(name, *row(name, "01", [one]), *row(name, "05", [two])) for name in names]
    return table(("change", "one process", "two processes"), *rows)


def step(folder):
    return breakdown.report(read(folder, "breakdown")["milliseconds_by_rank"])


def forecasts(folder):
    """Compare timeline.py's forecasts with what was measured."""
    data = drawn(folder)
    rows = [("step", "ranks", "forecast", "measured", "error")]
    for ranks, record in data["records"].items():
        for name, forecast_ms, measured_ms in timeline.compared(record, data["network"]):
            error = f"{forecast_ms / measured_ms - 1:+.0%}"
            rows.append((name, ranks, f"{forecast_ms:.0f} ms", f"{measured_ms:.0f} ms", error))
    return table(*rows)


def drawn(folder):
    """Return the data of the figure on diffs' page: the recorded steps, and the network."""
    records = {str(n): read(folder, f"timeline-{n}") for n in (2, 4)}
    network = timeline.fit([read(folder, f"communication-{n}") for n in (2, 3)])
    return {"written_by": "benchmarks/all.py", "network": network, "records": records}


def processes(folder):
    return scaling.summary_table(read(folder, "scaling")["summary"])


def learning(folder):
    return learning_rate.summary_table(read(folder, "learning_rate")["summary"])


def network(folder):
    two = read(folder, "communication-2")
    latency, byte = drawn(folder)["network"]
    speed = f"{1e-9 / byte:.1f} GB/s" if byte else "too fast to tell"
    payload, ways = list(two["gather_seconds"].items())[-1]
    return table(
        ("gloo on this machine", ""),
        ("latency and bandwidth, fitted to 2 and 3 ranks", f"{latency * 1e6:.0f} µs, {speed}"),
        *(
            (f"2 ranks: {way}, {int(payload):,} B per rank", f"{seconds * 1e3:.1f} ms")
            for way, seconds in ways.items()
        ),
    )


MADE = (measured_on, baselines, step, forecasts, lines, processes, learning, network)
TABLES = {make.__name__: make for make in MADE}


def filled(text, folder):
    """Return the page with its tables filled in from the files in a folder."""
    return re.sub(
        r"(<!-- measured: (\w+) -->\n).*?(?=<!-- end -->)",
        lambda found: f"{found[1]}{TABLES[found[2]](folder)}\n",
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
