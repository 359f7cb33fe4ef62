"""The scripts that the pages of recipes and pitfalls make: a page is the patch."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.scripts import ROOT, write

NEEDS_PATCH = pytest.mark.skipif(
    not shutil.which("patch"), reason="needs the program: apt-get install patch"
)


def patched(tmp_path, name, *changes):
    """Write the patched script of a page, such as "more/recipes/fsdp2"; return the path."""
    return write(tmp_path / Path(step_of(name)).name, text_of(name), changes)


def page(name):
    """Return the text of the page of a recipe or pitfall."""
    return (ROOT / f"{name}.md").read_text(encoding="utf-8")


def step_of(name):
    """Return the name of the script that a recipe or pitfall patches."""
    return re.search(r"^--- (.+)$", page(name), re.MULTILINE)[1]


def text_of(name):
    """Return the patched script of a recipe or pitfall, like "more/recipes/fsdp2"."""
    if not shutil.which("patch"):
        pytest.skip("needs the program: apt-get install patch")
    step = ROOT / step_of(name)
    with tempfile.TemporaryDirectory() as place:  # patch writes a file of its own there, too
        if not step.exists():  # another recipe writes it
            step = write(Path(place, step.name), text_of(f"more/recipes/{step.stem}"))
        words = ["patch", "--quiet", "--output=-", step]
        return subprocess.run(
            words, input=page(name), check=True, stdout=subprocess.PIPE, text=True, cwd=place
        ).stdout


def on_screen(name):
    """Return the messages that a page quotes in its table of symptoms, without NCCL's."""
    _, _, table = page(name).partition("| Symptom |")
    rows = re.findall(r"^\| (?!NCCL)(.+?) \|", table.partition("\n\n")[0], re.MULTILINE)
    return [text for symptom in rows for text in re.findall(r"`([^`]+)`", symptom)]
