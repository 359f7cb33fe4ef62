"""The notebook diffs/walkthrough.ipynb: the stories, the hunks, and cells that run the steps."""

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

BEGIN = """\
# The DDP ladder, step by step

<!-- Written by diffs/generate.py: edit the scripts, notes.md and diffs/generator/notebook.py. -->

Five scripts take a PyTorch training from one GPU to many nodes. This notebook explains what changes
from each script to the next, and runs all of them on this machine: on its GPUs or, without any, in
several processes on its CPU. Open it from a clone of the repository, in the folder `diffs`, with
the packages of `requirements-dev.txt` installed. All cells together take one to two minutes on two
cores."""

SETUP = """\
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process: the same bits every time
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ["LADDER"] = str(Path.cwd().parent)  # the scripts: this notebook is in diffs/
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
folder = tempfile.TemporaryDirectory()  # for the checkpoints
os.environ["SAVED"] = folder.name"""

ALONE = """\
## Step 1: one process

The starting point is one process on one device. It learns to read handwritten digits, scanned at 8
by 8 pixels. 359 of them are held out; the last line says how many of those it reads correctly."""

AGAIN = "Ask for one more epoch, and it resumes from its checkpoint:"
NODES = """\
Two nodes with one process each, both on this machine: two agents that meet at one address. On a
cluster each agent runs on a node of its own."""

STANDALONE = "torchrun --standalone --nproc-per-node=2"
MEETING = """\
free="from torch.distributed.elastic.utils import distributed; print(distributed.get_free_port())"
port=$(python -c "$free")
for node in 1 2; do
  torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:$port \\
   """
RUNS = {  # the cells of each step: (cell id, text above, launcher, epochs, end of the command)
    "01": [("run-01", ALONE, "python", 2, "")],
    "02": [("run-02", "", "python", 2, "")],
    "03": [("run-03", "", STANDALONE, 2, ""), ("run-03-again", AGAIN, STANDALONE, 3, "")],
    "04": [("run-04", NODES, MEETING, 2, " &\ndone; wait")],
    "05": [("run-05", "", STANDALONE, 2, "")],
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
            yield markdown(f"{diff.slug}-{hunk.note.slug}"[:64], hunk.markdown)
        yield from runs(diff.new.name[:2], scripts)


def runs(step, scripts):
    """Yield the cells that run a step; the checkpoints go to a temporary folder."""
    for name, text, launcher, epochs, rest in RUNS[step]:
        if text:
            yield markdown(f"{name}-text", text)
        command = f'{launcher} "$LADDER/{scripts[step]}" {epochs} --checkpoint-path {step}.pt{rest}'
        yield code(name, f'%%bash\ncd "$SAVED"\n{command}')


def markdown(name, text):
    return new_markdown_cell(text, id=name)


def code(name, text):
    return new_code_cell(text, id=name)


def write_book(path, diffs):
    """Return the notebook as text; cells that did not change keep their stored outputs."""
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
    """Execute the notebook in its folder and store what it prints."""
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
    """Return everything that went to stdout as one output: where it is cut depends on timing."""
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return [new_output("stream", name="stdout", text=text)] if text else []
