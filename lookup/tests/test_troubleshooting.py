"""The messages of lookup/ that have no source are those that PyTorch prints here."""

import json
import re
import sys
from pathlib import Path

import pytest
from support import server
from support.jobs import run
from support.scripts import ROOT

REFUSALS = Path(__file__).with_name("refusals.py")
ALIASES = json.loads((ROOT / "lookup" / "aliases.json").read_text(encoding="utf-8"))
# What is run, alone and on each of two ranks, and what it prints: nothing, where it has to work.
PRINTED = json.loads(Path(__file__).with_name("printed.json").read_text(encoding="utf-8"))


def shape(text):
    """Return a text without its numbers, and with its exit codes."""
    text = " ".join(text.split())
    return re.sub(r"(?<!exitcode: )(?<!exitcode: -)(?<!Signal )\b\d+(?:ms)?", "0", text)


@pytest.mark.parametrize(("where", "ranks"), [("alone", 0), ("two ranks", 2)])
def test_what_pytorch_prints(tmp_path, where, ranks):
    codes = json.dumps([code for code, *_ in PRINTED[where]])
    words = [REFUSALS, codes]
    job = run(server.command(*words, nprocs=ranks) if ranks else [sys.executable, *words], tmp_path)
    printed = shape(job.stdout + job.stderr)
    for code, *messages in PRINTED[where]:
        for message in messages or [f"works: {code}"]:
            assert shape(message) in printed, code


def entries():
    """Yield each entry of lookup/, with its aliases."""
    for path in sorted(ROOT.glob("lookup/*.md")):
        for part in re.split(r"^##+ ", path.read_text(encoding="utf-8"), flags=re.M):
            heading = re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).replace(" ", "-")
            aliases = ALIASES.get(f"lookup/{path.name}#{heading}", [])
            yield " ".join([*part.split(), *aliases])


def test_an_entry_says_what_to_do_about_it():
    """Such an entry has no source: its message is not quoted, but seen."""
    seen = [entry for entry in entries() if "[source]" not in entry]
    messages = [message for rows in PRINTED.values() for _, *each in rows for message in each]
    assert [text for text in messages if not any(text in entry for entry in seen)] == []
