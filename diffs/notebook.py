"""The notebook diffs/walkthrough.ipynb: story, diff, notes, and cells that run the scripts."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

BEGIN = """\
# The DDP ladder, step by step

Five scripts take a PyTorch training from one GPU to many nodes. This notebook tells what changes from
each to the next, and why, and runs each of them on this machine: on its GPUs or, without one, in
processes on its CPU. It wants to be opened from a clone of the repository, in the folder `diffs`, with the
packages of `requirements.txt` installed; all of it takes about a minute on two cores."""

SETUP = """\
import os
import sys
import tempfile
from pathlib import Path

ladder = Path.cwd().parent  # where the scripts are: this notebook lies in diffs/
saved = tempfile.mkdtemp()  # where the checkpoints go
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process: the same bits every time"""

ALONE = """\
## Step 1: one process

What you have today: one process on one device. It reads 8 × 8 pixel scans of handwritten digits; 359 of them are held
out, and the last line says how many of those it reads correctly."""

AGAIN = "Started again for one epoch more, it goes on from its checkpoint:"
NODES = """\
Two nodes of one process each, both on this machine: two agents that meet at one address. On a cluster each line runs
on a node of its own."""

RUNS = {  # what each step shows: (cell id, text before, command)
    "01": [("run-01", ALONE, "python {01} 2 --checkpoint-path 01.pt")],
    "02": [("run-02", "", "python {02} 2 --checkpoint-path 02.pt")],
    "03": [
        ("run-03", "", "torchrun --standalone --nproc-per-node=2 {03} 2 --checkpoint-path 03.pt"),
        (
            "run-03-again",
            AGAIN,
            "torchrun --standalone --nproc-per-node=2 {03} 3 --checkpoint-path 03.pt",
        ),
    ],
    "04": [
        (
            "run-04",
            NODES,
            "for node in 1 2; do torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"
            " --rdzv-endpoint=localhost:29400 {04} 2 --checkpoint-path 04.pt & done; wait",
        )
    ],
    "05": [
        ("run-05", "", "torchrun --standalone --nproc-per-node=2 {05} 1 --checkpoint-path 05.pt")
    ],
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
    paths = {number: f'"$ladder/{name}"' for number, name in scripts.items()}
    for name, text, command in RUNS[step]:
        if text:
            yield markdown(f"{name}-text", text)
        for number, path in paths.items():
            command = command.replace(f"{{{number}}}", path)
        yield code(name, f'!cd "$saved" && {command}')


def markdown(name, text):
    return new_markdown_cell(text, id=name)


def code(name, text):
    return new_code_cell(text, id=name)


def notebook(path, diffs):
    """Return the notebook as text, with the outputs that the file has for cells that are as they were."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = new_notebook(cells=list(cells(diffs)), metadata=metadata, nbformat_minor=5)
    if path.exists():
        stored = {cell.id: cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"}
        for cell in book.cells:
            old = stored.get(cell.id)
            if old and old.source == cell.source:
                cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return written(book)


def written(book):
    nbformat.validate(book)
    return nbformat.writes(book) + "\n"


def run(path):
    """Execute the notebook in its folder, and store what it printed."""
    from nbclient import NotebookClient

    book = nbformat.read(path, 4)
    client = NotebookClient(
        book, timeout=600, record_timing=False, resources={"metadata": {"path": str(path.parent)}}
    )
    metadata = dict(book.metadata)
    client.execute()
    book.metadata = metadata  # without this machine's Python version
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    path.write_text(written(book), encoding="utf-8", newline="\n")


def merged(outputs):
    """Return the outputs with what was printed in one piece: where it was cut is chance."""
    result = []
    for output in outputs:
        if result and output.output_type == result[-1].output_type == "stream":
            if output.name == result[-1].name:
                result[-1].text += output.text
                continue
        result.append(output)
    return result
