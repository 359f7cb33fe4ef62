"""The notebook diffs/walkthrough.ipynb: the notes, the hunks, and cells that run the steps."""

import re

import nbformat
from hunks import FIGURE
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from templates import ENV, HERE

CELL = re.compile(r"^<!-- (\w+): (\S+) -->\n", re.MULTILINE)  # kind and id of the cell that follows
PICTURE = re.compile(r"\n\n!\[.+\]\((pictures/(.+)\.svg)\)")
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # metadata for Jupyter and Colab


def cells(diffs):
    """Yield all cells, without outputs. A drawing has its own, because Colab shows none in text."""
    _, *found = CELL.split(ENV.get_template("notebook.md.j2").render(diffs=diffs))
    headings = {note.slug: note.title.replace(" ", "-") for diff in diffs for note in diff.notes}
    for kind, name, text in zip(found[::3], found[1::3], map(str.strip, found[2::3])):
        if kind == "markdown":
            prose = FIGURE.sub("", PICTURE.sub("", text)).strip()
            yield new_markdown_cell(with_links(prose, headings), id=name)
        else:
            yield new_code_cell(text, id=name, metadata=FOLDED if kind == "folded" else {})
        for path, picture in PICTURE.findall(text):
            drawing = (HERE.parent / path).read_text(encoding="utf-8").rstrip("\n")
            yield new_code_cell(f"%%svg\n{drawing}", id=f"picture-{picture}", metadata=FOLDED)


def with_links(text, headings):
    """Return a text with links that work in Jupyter. `headings` is {GitHub's id: Jupyter's id}.

    Links to other pages become plain paths, because the notebook may be used without a clone.
    """
    text = re.sub(r"\]\(#([^)]+)\)", lambda link: f"](#{headings[link[1]]})", text)
    text = re.sub(r"\(\[[^]]+\]\(\.\./([^)]+)\)\)", r"(`\1`)", text)
    return re.sub(r"\[([^]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", text)


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
    return nbformat.writes(book) + "\n"


def run(path):
    """Execute the notebook in its folder and store what it prints on stdout, and its pictures."""
    from nbclient import NotebookClient  # here, because the import takes a second

    book = nbformat.read(path, 4)
    metadata = dict(book.metadata)
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(book, **options, resources=resources).execute()
    book.metadata = metadata  # the stored metadata, without this machine's version of Python
    for cell in book.cells:
        if cell.cell_type == "code":
            outputs = [] if cell.id.startswith("script-") else cell.outputs
            cell.outputs = [output for output in outputs if output.get("name") != "stderr"]
    path.write_text(nbformat.writes(book) + "\n", encoding="utf-8", newline="\n")
