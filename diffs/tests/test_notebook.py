"""The notebook of the walk-through runs anywhere, and shows what it printed."""

import json
import re

import nbformat
import pytest
from nbclient import NotebookClient
from pretended import SHIM
from support.jobs import environment
from support.scripts import ROOT

RUNS = ["run-01", "run-02", "run-03", "run-03-again", "run-04", "run-05"]


@pytest.fixture
def book():
    return nbformat.read(ROOT / "diffs" / "walkthrough.ipynb", 4)


def outputs(book):
    """Return what each cell has printed on stdout, by its id. There are no errors."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert {o.output_type for cell in code for o in cell.outputs} == {"stream", "display_data"}
    return {
        cell.id: "".join(o.text for o in cell.outputs if o.get("name") == "stdout")
        for cell in code
        if cell.id == "setup" or cell.id.startswith("run-")
    }


def losses(text):
    return [float(loss) for loss in re.findall(r"epoch \d  loss (\d\.\d{4})  ", text)]


def test_the_notebook_shows_that_every_script_learned_and_leads_nowhere_else(book):
    nbformat.validate(book)
    printed = outputs(book)
    assert [*printed] == ["setup", *RUNS]
    for name in RUNS:
        assert losses(printed[name]), printed[name]
        percent = re.search(r"^accuracy (\d+\.\d\d)% \(\d+/359\)$", printed[name], re.MULTILINE)
        assert float(percent[1]) > 95, printed[name]
    assert printed["run-03-again"].startswith("resuming from 03.pt after epoch 2\nepoch 3 ")
    assert not re.search(rf"\]\(\.\./|\]\(pictures/|/tmp/|{ROOT}", json.dumps(book))


@pytest.mark.weekly("trains every step twice more; tests/ does so, with the same commands")
@pytest.mark.parametrize(
    ("gpus", "until"), [("", RUNS[-1]), ("0", "run-02"), ("0,1", RUNS[-1])], ids=["0", "1", "2"]
)
def test_the_notebook_runs_on_any_machine(book, tmp_path, gpus, until):
    """Without the clone, with as many GPUs of the stand-in: always with two ranks."""
    stored = outputs(book)
    del book.cells[[cell.id for cell in book.cells].index(until) + 1 :]
    client = NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    machine = {"CUDA_VISIBLE_DEVICES": gpus, "GPU_SHIM_RECORD": str(tmp_path / ".calls")}
    client.execute(env=environment(**SHIM | machine))
    printed = outputs(book)
    where = "two GPUs" if gpus == "0,1" else "the CPU"
    assert printed["setup"].endswith(f"Two ranks will train on {where}\n")
    for name in printed:  # one rank, or a second run, would print a different loss
        assert losses(printed[name]) == pytest.approx(losses(stored[name]), rel=0.03), name
    assert {path.name for path in tmp_path.iterdir()} <= {".calls"}
