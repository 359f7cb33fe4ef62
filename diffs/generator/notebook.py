"""The notebook diffs/walkthrough.ipynb: the stories, the hunks, and cells that run the steps."""

import re

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from templates import HERE

# The texts of cells that are in no note, and the code that is in no script: {name: text}.
_, *FOUND = re.split(r"^<!-- (\S+) -->\n", (HERE / "notebook.md").read_text("utf-8"), flags=re.M)
TEXTS = {name: text.strip() for name, text in zip(FOUND[::2], FOUND[1::2])}
PICTURE = re.compile(r"\n\n!\[.+\]\((pictures/(.+)\.svg)\)")
STANDALONE = "torchrun --standalone --nproc-per-node=2"
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # in Jupyter, and in Colab
RUNS = {  # the cells of each step: {name: (launcher, epochs, end of the command)}
    "01": {"run-01": ("python", 2, "")},
    "02": {"run-02": ("python", 2, "")},
    "03": {"run-03": (STANDALONE, 2, ""), "run-03-again": (STANDALONE, 3, "")},
    "04": {"run-04": (TEXTS["two-nodes"], 2, " &\ndone; wait")},
    "05": {"run-05": (STANDALONE, 2, "")},
}


def cells(diffs):
    """Yield the cells, without outputs."""
    scripts = {path.name[:2]: path for diff in diffs for path in (diff.old, diff.new)}
    yield markdown("begin", TEXTS["begin"])
    yield code("setup", TEXTS["setup"])
    yield markdown("story-01", TEXTS["story-01"])
    yield from runs("01", scripts)
    for diff in diffs:
        lesson = diff.short(lambda title: title.replace(" ", "-"))  # as Jupyter names headings
        text = f"## {diff.name}: {diff.title}\n\n{lesson}\n\n{diff.story}"
        yield from story(f"story-{diff.slug}", text)
        for note in diff.notes:
            yield markdown(f"{diff.slug}-{note.slug}"[:64], linked(note.markdown, diff.notes))
        yield from runs(diff.new.name[:2], scripts)


def linked(text, notes):
    """Return a text in which links within the page lead to headings as Jupyter names them."""
    for note in notes:
        text = text.replace(f"](#{note.slug})", f"](#{note.title.replace(' ', '-')})")
    return text


def story(name, text):
    """Yield a text and its pictures: Colab shows no drawing that is part of a text."""
    yield markdown(name, PICTURE.sub("", text))
    for path, picture in PICTURE.findall(text):
        drawing = (HERE.parent / path).read_text(encoding="utf-8").rstrip("\n")
        yield code(f"picture-{picture}", f"%%svg\n{drawing}", **FOLDED)


def runs(step, scripts):
    """Yield the cells that write the script of a step, and those that run it."""
    path = scripts[step]
    text = path.read_text(encoding="utf-8").rstrip("\n")
    yield markdown(f"script-{step}-text", TEXTS["script"].format(path.name))
    yield code(f"script-{step}", f"%%writefile {path.name}\n{text}", **FOLDED)
    for name, (launcher, epochs, rest) in RUNS[step].items():
        if name in TEXTS:
            yield markdown(f"{name}-text", TEXTS[name])
        anew = "" if name.endswith("again") else f"rm -f {step}.pt\n"
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
