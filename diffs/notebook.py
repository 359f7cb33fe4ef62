"""The notebook diffs/walkthrough.ipynb: story, diff, notes, and cells that run the scripts."""

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

BEGIN = """\
# The DDP ladder, step by step

Five scripts take a PyTorch training from one GPU to many nodes. This notebook tells what changes
from each to the next, and why, and runs each of them on this machine: on its GPUs or, without one,
in processes on its CPU. It wants to be opened from a clone of the repository, in the folder
`diffs`, with the packages of `requirements.txt` installed. All of it takes about a minute on two
cores."""

SETUP = """\
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process: the same bits every time
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # not a word on who hangs up first
os.environ["LADDER"] = str(Path.cwd().parent)  # the scripts: this notebook lies in diffs/
os.environ["SAVED"] = tempfile.mkdtemp()  # the checkpoints
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])"""

ALONE = """\
## Step 1: one process

What you have today: one process on one device. It learns to read handwritten digits, scanned with
8 by 8 pixels; 359 of them are held out, and the last line says how many of those it reads
correctly."""

AGAIN = "Started again for one epoch more, it goes on from its checkpoint:"
NODES = """\
Two nodes of one process each, both on this machine: two agents that meet at one address. On a
cluster each runs on a node of its own."""

STANDALONE = "torchrun --standalone --nproc-per-node=2"
MEETING = "--rdzv-backend=c10d --rdzv-endpoint=localhost:29400"
RUNS = {  # what is run of each step: (cell id, text before, command, script's arguments, rest)
    "01": [("run-01", ALONE, "python", "2", "")],
    "02": [("run-02", "", "python", "2", "")],
    "03": [("run-03", "", STANDALONE, "2", ""), ("run-03-again", AGAIN, STANDALONE, "3", "")],
    "04": [
        (
            "run-04",
            NODES,
            f"for node in 1 2; do\n  torchrun --nnodes=2 {MEETING} \\\n   ",
            "2",
            " &\ndone; wait",
        )
    ],
    "05": [("run-05", "", STANDALONE, "1", "")],
}


def cells(diffs):
    """Yield the cells, without outputs."""
    scripts = {path.name[:2]: path.name for diff in diffs for path in (diff.old, diff.new)}
    yield markdown("begin", BEGIN)
    yield code("setup", SETUP)
    yield from runs("01", scripts)
    for diff in diffs:
        yield markdown(f"story-{diff.slug}", f"## {diff.name}: {diff.title}\n\n{diff.story}")
        for hunk in diff.hunks:
            yield markdown(f"{diff.slug}-{hunk.note.slug}"[:64], explained(hunk))
        yield from runs(diff.new.name[:2], scripts)


def explained(hunk):
    """Return a hunk and its note as Markdown."""
    return f"### {hunk.note.title}\n\n```diff\n{hunk.text}\n```\n\n{hunk.note.markdown}"


def runs(step, scripts):
    """Yield the cells that run a step, in the folder for the checkpoints."""
    for name, text, launcher, epochs, rest in RUNS[step]:
        if text:
            yield markdown(f"{name}-text", text)
        command = f'{launcher} "$LADDER/{scripts[step]}" {epochs} --checkpoint-path {step}.pt{rest}'
        yield code(name, f'%%bash\ncd "$SAVED"\n{command}')


def markdown(name, text):
    return new_markdown_cell(text, id=name)


def code(name, text):
    return new_code_cell(text, id=name)


def notebook(path, diffs):
    """Return the notebook as text, with the stored outputs of cells that are as they were."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = new_notebook(cells=list(cells(diffs)), metadata=metadata, nbformat_minor=5)
    stored = {cell.id: cell for cell in nbformat.read(path, 4).cells} if path.exists() else {}
    for cell in book.cells:
        old = stored.get(cell.id)
        if cell.cell_type == "code" and old and old.source == cell.source:
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return written(book)


def written(book):
    nbformat.validate(book)
    return nbformat.writes(book) + "\n"


def run(path):
    """Execute the notebook in its folder, and store what it printed."""
    book = nbformat.read(path, 4)
    metadata = dict(book.metadata)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(book, timeout=600, record_timing=False, resources=resources).execute()
    book.metadata = metadata  # without this machine's version of Python
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = printed(cell.outputs)
    path.write_text(written(book), encoding="utf-8", newline="\n")


def printed(outputs):
    """Return what the scripts printed, in one piece: where it was cut is chance."""
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return [new_output("stream", name="stdout", text=text)] if text else []
