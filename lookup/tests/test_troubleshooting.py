"""The messages of lookup/ that have no source are those that PyTorch prints here."""

import json
import re
import sys
from pathlib import Path

import pytest
from support import server
from support.jobs import run
from support.scripts import ROOT

PAGES = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("lookup/*.md"))]
REFUSALS = Path(__file__).with_name("refusals.py")
ENTRIES = [
    " ".join(part.split()) for page in PAGES for part in re.split(r"^##+ ", page, flags=re.M)
]
ALONE, TWO = json.loads(
    Path(__file__).with_name("printed.json").read_text(encoding="utf-8")
).values()
WORKS = ["FSDP1 works with {} {'recurse': False}", "FSDP1 works with {'use_orig_params': True} {}"]


def shape(text):
    """Return a text without its numbers, and with its exit codes."""
    text = " ".join(text.split())
    return re.sub(r"(?<!exitcode: )(?<!exitcode: -)(?<!Signal )\b\d+(?:ms)?", "0", text)


@pytest.mark.parametrize(
    ("messages", "ranks"), [(ALONE, 0), (TWO + WORKS, 2)], ids=["alone", "two-ranks"]
)
def test_what_pytorch_prints(tmp_path, messages, ranks):
    start = server.command(REFUSALS, nprocs=ranks) if ranks else [sys.executable, REFUSALS]
    job = run(start, tmp_path)
    printed = shape(job.stdout + job.stderr)
    assert [text for text in messages if shape(text) not in printed] == []


def test_an_entry_says_what_to_do_about_it():
    """Such an entry has no source: its message is not quoted, but seen."""
    seen = [entry for entry in ENTRIES if "[source]" not in entry]
    assert [text for text in (*ALONE, *TWO) if not any(text in entry for entry in seen)] == []
