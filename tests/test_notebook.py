"""The notebook of the walk-through is valid, runs, and shows what it printed."""

import json
import re

import hunks
import nbformat
import pytest
from nbclient import NotebookClient
from support.generator import generate
from support.scripts import ROOT, SCRIPTS


@pytest.fixture
def book():
    return nbformat.read(ROOT / "diffs" / "walkthrough.ipynb", 4)


def check_outputs(book):
    """Every script has learned something, without an error."""
    printed = {
        cell.id: "".join(o.text for o in cell.outputs if o.get("name") == "stdout")
        for cell in book.cells
        if cell.cell_type == "code"
    }
    assert printed.pop("setup") == ""
    assert {o.output_type for cell in book.cells for o in cell.get("outputs", [])} == {"stream"}
    assert len(printed) == 6
    for name, text in printed.items():
        line = r"^epoch \d  loss \d\.\d{4}  [\d,]+ samples/s$"
        assert re.search(line, text, re.MULTILINE), (name, text)
        percent = float(re.search(r"^accuracy (\d+\.\d\d)% \(\d+/359\)$", text, re.MULTILINE)[1])
        assert percent > 95, (name, text)
        assert "Error" not in text, text
    resumed = "resuming from 03.pt after epoch 2\nepoch 3 "
    assert printed["run-03-again"].startswith(resumed)
    assert "macro avg" in printed["run-05"]


def test_the_notebook_is_valid_and_has_outputs(book):
    nbformat.validate(book)
    check_outputs(book)
    text = json.dumps(book)
    assert str(ROOT) not in text
    assert "/tmp/" not in text
    for path in SCRIPTS:
        assert path.name in text
    assert text.count("```diff") == sum(len(diff.hunks) for diff in hunks.explained(ROOT))


def test_outputs_of_unchanged_cells_are_kept(copy):
    path = copy / "diffs" / "walkthrough.ipynb"
    before = nbformat.read(path, 4)
    for cell in before.cells:
        cell.source += "\n# as it was before" if cell.id == "run-02" else ""
    nbformat.write(before, path)
    assert generate(copy).returncode == 0
    outputs = {c.id: c.outputs for c in nbformat.read(path, 4).cells if c.cell_type == "code"}
    assert outputs["run-02"] == []
    assert outputs["run-03"] == next(cell for cell in before.cells if cell.id == "run-03").outputs


@pytest.mark.repetition  # of the README's commands
def test_the_notebook_runs_from_top_to_bottom(copy, book):
    resources = {"metadata": {"path": str(copy / "diffs")}}
    NotebookClient(book, timeout=300, resources=resources).execute()
    check_outputs(book)
    assert not list(copy.rglob("*.pt"))
