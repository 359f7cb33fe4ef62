"""The notebook of the walk-through runs anywhere, and shows what it printed."""

import json
import re

import nbformat
import pytest
from nbclient import NotebookClient
from pretended import SHIM
from support.jobs import environment
from support.results import shape
from support.scripts import ROOT

RUNS = ["run-01", "run-02", "run-03", "run-03-again", "run-04", "run-05"]


@pytest.fixture
def book():
    return nbformat.read(ROOT / "diffs" / "walkthrough.ipynb", 4)


def printed(book):
    """Return what the first cell and each run have printed on stdout, by the id of the cell."""
    return {
        cell.id: "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in book.cells
        if cell.id in ("setup", *RUNS)
    }


def losses(text):
    return [float(loss) for loss in re.findall(r"epoch \d  loss (\d\.\d{4})  ", text)]


def test_the_notebook_shows_that_every_script_learned_and_leads_nowhere_else(book):
    texts = printed(book)
    for name in RUNS:
        percent = re.search(r"^accuracy (\d+\.\d\d)% \(\d+/359\)$", texts[name], re.MULTILINE)
        assert losses(texts[name]) and float(percent[1]) > 95, texts[name]
    assert "\nresuming from 03.pt after epoch 2\nepoch 3 " in texts["run-03-again"]
    assert all(cell.outputs for cell in book.cells if cell.id.startswith("picture-"))
    assert not re.search(rf"\]\(\.\./|\]\(pictures/|/tmp/|{ROOT}", json.dumps(book))


@pytest.mark.weekly("trains every step three times more; tests/ does so, with the same commands")
@pytest.mark.parametrize("gpus", ["", "0", "0,1"])
def test_the_notebook_runs_on_any_machine(book, tmp_path, gpus):
    """Without the clone, with as many GPUs of the stand-in: always with two ranks."""
    stored = printed(book)
    client = NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    machine = {"CUDA_VISIBLE_DEVICES": gpus, "GPU_SHIM_RECORD": str(tmp_path / ".calls")}
    client.execute(env=environment(**SHIM | machine))
    texts = printed(book)
    where = "two GPUs" if gpus == "0,1" else "the CPU"
    assert texts["setup"].endswith(f"Two ranks will train on {where}\n")
    for name in RUNS:  # one rank, or a second run, would print a different loss
        assert losses(texts[name]) == pytest.approx(losses(stored[name]), rel=0.03), name
        assert shape(texts[name])[1:] == shape(stored[name])[1:], name  # the first line: where
    assert {path.name for path in tmp_path.iterdir()} <= {".calls"}
