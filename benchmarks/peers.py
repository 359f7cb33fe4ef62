"""Run step 5 beside what readers would use instead, with the same model, data, batch and ranks.

    python benchmarks/peers.py

The programs are step 5; those of lookup/frameworks.md in Accelerate, Fabric and the Hugging Face
Trainer, with the lines that resume; what PyTorch's DDP series ends with; and a bare loop with DDP.
Each round starts all of them in turn, and compares them with the step 5 of that round. Then each is
told to stop, or killed, in the middle of its second epoch, and started once more.
"""

import ast
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from shared import (
    GREY,
    ROOT,
    STEPS,
    cell,
    drawing,
    launcher,
    load,
    middle,
    parser_of,
    positive_int,
    replaced,
    table,
    write,
)
from tqdm import tqdm

PROGRAMS = Path(__file__).resolve().parent / "programs"
FORMS = {  # what is compared, and how its value is written
    "samples/s": "{:,.0f}".format,
    "first step": "{:.1f} s".format,
    "memory": lambda size: f"{size / 2**20:,.0f} MiB",
}
LOOP, TRAIN = "for epoch in range(args.total_epochs):", "trainer.train()"
IMPORT = "from importlib import import_module\n"
RESUME = {  # the lines that resume: what to replace in the programs of lookup/frameworks.md
    "Accelerate": [
        (IMPORT, f"import glob\n{IMPORT}"),
        ('f"{args.checkpoint_path}.state"', 'f"{args.checkpoint_path}.{epoch + 1}"'),
        (
            LOOP,
            'done = len(glob.glob(f"{args.checkpoint_path}.*"))\n'
            'if done:\n    accelerator.load_state(f"{args.checkpoint_path}.{done}")\n'
            "for epoch in range(done, args.total_epochs):",
        ),
    ],
    "Fabric": [
        (
            LOOP,
            "done = 0\nif os.path.exists(args.checkpoint_path):\n"
            '    state = {"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer}\n'
            '    done = fabric.load(args.checkpoint_path, state)["EPOCHS_RUN"]\n'
            "for epoch in range(done, args.total_epochs):",
        ),
    ],
    "Trainer": [
        (IMPORT, f"import os\n{IMPORT}"),
        (
            TRAIN,
            "from transformers.trainer_utils import get_last_checkpoint\n\nfolder = "
            "arguments.output_dir\nlast = get_last_checkpoint(folder) if os.path.isdir(folder) "
            "else None\ntrainer.train(resume_from_checkpoint=last)",
        ),
    ],
}


# ---------------------------------------------------------------- the programs


def programs():
    """Return {name: the text of a program}, step 5 first."""
    page = (ROOT / "lookup" / "frameworks.md").read_text(encoding="utf-8")
    found = re.findall(r"^## Step 5 in (?:the )?(\w+)\n.*?^```python\n(.*?)^```", page, re.M | re.S)
    texts = {name: replaced(text, RESUME[name], name) for name, text in found}
    texts["DDP series"] = (PROGRAMS / "ddp_series.py").read_text(encoding="utf-8")
    texts["bare loop"] = (PROGRAMS / "bare_loop.py").read_text(encoding="utf-8")
    return {"step 5": STEPS["05"].read_text(encoding="utf-8"), **texts}


def lines(text):
    """Count the lines with something on them, without step 5's data, model and arguments."""
    shared = ("load_datasets", "build_model", "parse_args")
    parts = [part for part in ast.parse(text).body if getattr(part, "name", "") in shared]
    borrowed = {line for part in parts for line in range(part.lineno, part.end_lineno + 1)}
    return sum(n not in borrowed for n, line in enumerate(text.splitlines(), 1) if line.strip())


class Program:
    """A program, in a folder for what it saves and notes."""

    def __init__(self, folder, text, args):
        self.folder, self.args = Path(folder), args
        self.path = self.folder / "program.py"
        self.path.write_text(text, encoding="utf-8")
        samples = len(load("05").load_datasets()[0])
        self.samples = -(-samples // args.processes) * args.processes  # of an epoch
        self.steps = -(-self.samples // args.processes // args.batch_size)

    def run(self, epochs, **watched):
        """Run it to its end; return the process and the moment that it was started."""
        words = [*launcher(self.args.processes), PROGRAMS / "watched.py", self.path, str(epochs)]
        words += ["1", f"--batch-size={self.args.batch_size}", f"--width={self.args.width}"]
        words += [f"--checkpoint-path={self.folder}/checkpoint.pt"]
        watched = json.dumps({"folder": str(self.folder), **watched})
        env = {**os.environ, "WATCHED": watched, "PYTHONPATH": str(ROOT)}
        env["OMP_NUM_THREADS"] = str(self.args.threads)
        start = time.time()
        options = {"env": env, "cwd": self.folder, "capture_output": True, "text": True}
        return subprocess.run(words, check=False, timeout=1800, **options), start

    def aborted(self, result, epochs):
        """Return whether a run took all its steps and then aborted; end at any other failure."""
        taken = min(path.stat().st_size for path in self.folder.glob("steps-*"))
        abort = "SIGABRT" in result.stderr and taken >= epochs * self.steps
        if result.returncode and not abort:
            raise SystemExit(f"{self.path.read_text()}\n{result.stdout}{result.stderr}")
        return abort

    def timed(self):
        """Return what is compared: samples/s after the first epoch, seconds to the first step,
        and the peak of a rank's memory; and whether it aborted at its end."""
        epochs = self.args.epochs
        result, start = self.run(epochs, steps=[1, self.steps, epochs * self.steps])
        aborted = self.aborted(result, epochs)
        paths = self.folder.glob("times-*")
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        first, begin, end = (max(moments) for moments in zip(*(rank["times"] for rank in ranks)))
        return {
            "samples/s": (epochs - 1) * self.samples / (end - begin),
            "first step": first - start,
            "memory": max(rank["peak"] for rank in ranks),
        }, aborted

    def repeated(self, number):
        """Return how many steps are taken twice after a signal in the middle of the second epoch,
        how many samples the evaluation counts, if any, and whether it aborted at its end."""
        at = self.steps + self.steps // 2
        self.run(2, steps=[], at=at, signal=number)
        result, _ = self.run(2, steps=[], at=at)
        aborted = self.aborted(result, 2)
        counted = re.search(r"^accuracy .* \((\d+)/\d+\)$", result.stdout, re.MULTILINE)
        taken = (self.folder / "steps-0").stat().st_size
        return taken - 2 * self.steps, int(counted[1]) if counted else None, aborted


# ---------------------------------------------------------------- measuring and showing


def compared(texts, args):
    """Return {name: {what: its median, and quartiles relative to step 5's}}, and {name: aborts}."""
    rounds, aborts = [], Counter()
    for _ in tqdm(range(args.repeats), unit="round"):
        rounds.append({})
        for name, text in texts.items():
            with tempfile.TemporaryDirectory() as folder:
                rounds[-1][name], aborted = Program(folder, text, args).timed()
                aborts[name] += aborted
    if not rounds:
        return {}, aborts
    found = {
        name: {
            what: {
                "value": middle([each[name][what] for each in rounds])["median"],
                **middle([each[name][what] / each["step 5"][what] for each in rounds]),
            }
            for what in rounds[0][name]
        }
        for name in texts
    }
    return found, aborts


def stopped(text, args):
    """Return how many steps are repeated after each signal, the samples counted, and the aborts."""
    row = {"aborts": 0}
    for number in (signal.SIGKILL, signal.SIGTERM):
        with tempfile.TemporaryDirectory() as folder:
            found = Program(folder, text, args).repeated(number)
        row[number.name], row["counted"], aborted = found
        row["aborts"] += aborted
    return row


def report(record):
    """Return what was found as a Markdown table; what was not measured has no column."""
    rows = record["programs"]
    ratios = [what for what in FORMS if what in rows[0]]
    heading = [*ratios, "lines", "SIGKILL repeats", "SIGTERM repeats", "samples evaluated"]
    heading += ["aborts at its end"] * ("aborts" in rows[0])
    cells = [
        (
            row["name"],
            *(
                cell(row[what]) if row is not rows[0] else FORMS[what](row[what]["value"])
                for what in ratios
            ),
            row["lines"],
            *(f"{row[name]} steps" for name in ("SIGKILL", "SIGTERM")),
            row["counted"] or "none",
            *([f"{row['aborts']} of {row['runs']} runs"] if "aborts" in row else []),
        )
        for row in rows
    ]
    return table(("program", *heading), *cells)


def draw(rows, path):
    """Draw what was compared, relative to step 5, with its quartiles."""
    names = [row["name"] for row in rows]
    options = {"figsize": (9, 2.6), "ncols": len(FORMS), "sharey": True}
    with drawing(path, "Beside what you would use instead", **options) as axes:
        for axis, what in zip(axes, FORMS):
            low, median, high = ([row[what][n] for row in rows] for n in ("low", "median", "high"))
            axis.axvline(1, color=GREY, linewidth=0.8)
            axis.hlines(names, low, high, color=GREY, linewidth=3)
            axis.plot(median, names, "o", color="#0969da")
            axis.set(xlabel=f"{what}, relative to step 5")
        axes[0].invert_yaxis()


def parse_args():
    parser = parser_of(__doc__)
    number = {"type": positive_int}
    parser.add_argument("--processes", default=2, help="world size", **number)
    parser.add_argument("--threads", default=1, help="per process", **number)
    parser.add_argument("--batch-size", default=128, help="per process", **number)
    parser.add_argument("--width", default=32, help="of the model; 256 for GPUs", **number)
    parser.add_argument("--epochs", default=4, help="per run; the first is the warm-up", **number)
    parser.add_argument("--repeats", default=7, type=int, help="rounds; 0: no times")
    return parser.parse_args()


def main():
    args = parse_args()
    texts = programs()
    found, aborts = compared(texts, args)
    rows = []
    for name, text in tqdm(texts.items(), unit="program"):
        row = {"name": name, "lines": lines(text), **stopped(text, args), **found.get(name, {})}
        row["aborts"] += aborts[name]
        rows.append({**row, "runs": args.repeats + 2})
    write("peers", args, report, programs=rows)
    if found:
        draw(rows, "peers.svg")


if __name__ == "__main__":
    main()
