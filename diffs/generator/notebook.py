"""The notebook diffs/walkthrough.ipynb: the stories, the hunks, and cells that run the steps."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

BEGIN = """\
# The DDP ladder, step by step

<!-- Written by diffs/generate.py: edit the scripts, notes.md and diffs/generator/notebook.py. -->

Five scripts take a PyTorch training script from one GPU to many nodes. This notebook explains what
changes from each script to the next, and runs all of them.

Nothing else is needed: the notebook carries the scripts. Open it in Jupyter, or upload it to a
notebook service such as Colab or Kaggle, and run the cells from the top. (On Windows, start Jupyter
in WSL2.) The first cell says what this machine has, and installs what is missing; if PyTorch is
there, it stays as it is. Two ranks train on two GPUs or, with fewer, on the CPU. All cells together
take one to two minutes on two cores. Names such as `recipes/learning_rate.md` are pages of the
repository."""

SETUP = """\
import importlib.util
import os
import platform
import sys
import tempfile
from pathlib import Path

packages = {"torch": "torch", "sklearn": "scikit-learn"}
missing = " ".join(packages[name] for name in packages if not importlib.util.find_spec(name))
if missing:
    %pip install --quiet {missing}

import torch

gpus = torch.cuda.device_count()
two = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(two) if gpus > 1 else ""  # "" hides a single GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank: identical results every time
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
folder = tempfile.TemporaryDirectory()  # for the scripts and the checkpoints
os.chdir(folder.name)

print(f"Python {platform.python_version()}, PyTorch {torch.__version__}")
print(f"CPU cores: {os.cpu_count()}, GPUs: {gpus}")
print("Two ranks will train on", "two GPUs" if gpus > 1 else "the CPU")"""

SCRIPT = """\
The next cell is folded: it writes `{}`.
To try a change of your own, edit it, run it, and run the cells below it."""

ALONE = """\
## Step 1: one process

The starting point is one process on one device. It learns to read handwritten digits, scanned at 8
by 8 pixels. 359 of them are held out; the last line says how many of those it reads correctly."""

AGAIN = "Ask for one more epoch, and it resumes from its checkpoint:"
NODES = """\
Two nodes with one process each, both on this machine: two agents that meet at one address. On a
cluster each agent runs on a node of its own."""

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
PICTURE = re.compile(r"\n\n!\[.+\]\(pictures/(.+)\.svg\)")
STANDALONE = "torchrun --standalone --nproc-per-node=2"
MEETING = """\
free="from torch.distributed.elastic.utils import distributed; print(distributed.get_free_port())"
port=$(python -c "$free")
gpus=(${CUDA_VISIBLE_DEVICES//,/ })  # one for each node or, on the CPU, none
for node in 0 1; do
  CUDA_VISIBLE_DEVICES=${gpus[node]} torchrun --nnodes=2 --rdzv-backend=c10d \\
    --rdzv-endpoint=localhost:$port"""
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # in Jupyter, and in Colab
RUNS = {  # the cells of each step: (cell id, text above, launcher, epochs, end of the command)
    "01": [("run-01", "", "python", 2, "")],
    "02": [("run-02", "", "python", 2, "")],
    "03": [("run-03", "", STANDALONE, 2, ""), ("run-03-again", AGAIN, STANDALONE, 3, "")],
    "04": [("run-04", NODES, MEETING, 2, " &\ndone; wait")],
    "05": [("run-05", "", STANDALONE, 2, "")],
}


def cells(diffs):
    """Yield the cells, without outputs."""
    scripts = {path.name[:2]: path for diff in diffs for path in (diff.old, diff.new)}
    yield markdown("begin", BEGIN)
    yield code("setup", SETUP)
    yield markdown("story-01", ALONE)
    yield from runs("01", scripts)
    for diff in diffs:
        lesson = diff.short(lambda note: note.title.replace(" ", "-"))  # as Jupyter names headings
        text = f"## {diff.name}: {diff.title}\n\n{lesson}\n\n{diff.story}"
        yield from story(f"story-{diff.slug}", text)
        headings = {part.slug: part.markdown[4:].partition("\n")[0] for part in diff.told}
        for part in diff.told:
            yield markdown(f"{diff.slug}-{part.slug}"[:64], linked(part.markdown, headings))
        yield from runs(diff.new.name[:2], scripts)


def linked(text, headings):
    """Return a text in which links within the page lead to headings as Jupyter names them."""
    for slug, title in headings.items():
        text = text.replace(f"](#{slug})", f"](#{title.replace(' ', '-')})")
    return text


def story(name, text):
    """Yield a text and its pictures: Colab shows no drawing that is part of a text."""
    yield markdown(name, PICTURE.sub("", text))
    for picture in PICTURE.findall(text):
        drawing = (PICTURES / f"{picture}.svg").read_text(encoding="utf-8").rstrip("\n")
        yield code(f"picture-{picture}", f"%%svg\n{drawing}", **FOLDED)


def runs(step, scripts):
    """Yield the cells that write the script of a step, and those that run it."""
    path = scripts[step]
    text = path.read_text(encoding="utf-8").rstrip("\n")
    yield markdown(f"script-{step}-text", SCRIPT.format(path.name))
    yield code(f"script-{step}", f"%%writefile {path.name}\n{text}", **FOLDED)
    for name, text, launcher, epochs, rest in RUNS[step]:
        if text:
            yield markdown(f"{name}-text", text)
        anew = "" if text == AGAIN else f"rm -f {step}.pt\n"
        command = f"{launcher} {path.name} {epochs} --checkpoint-path {step}.pt{rest}"
        yield code(name, f"%%bash\n{anew}{command}")


def markdown(name, text):
    """Return a cell of text. It names other pages: links to them lead nowhere without the clone."""
    text = re.sub(r"\(\[[^]]+\]\(\.\./([^)]+)\)\)", r"(`\1`)", text)
    return new_markdown_cell(re.sub(r"\[([^]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", text), id=name)


def code(name, text, **metadata):
    return new_code_cell(text, id=name, metadata=metadata)


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
            cell.outputs = [] if cell.id.startswith("script-") else printed(cell.outputs)
    path.write_text(written(book), encoding="utf-8", newline="\n")


def printed(outputs):
    """Return the pictures, and all of stdout as one output: where it is cut depends on timing."""
    kept = [output for output in outputs if output.output_type == "display_data"]
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return kept + ([new_output("stream", name="stdout", text=text)] if text else [])
