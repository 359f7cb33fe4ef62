"""What the README shows is what its commands print, numbers apart."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, finished

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```console\n\$ (.+)\n((?:.*\n)*?)```$", README, re.MULTILINE)


def shape(text):
    """Return the lines of an output, with # for each number, and without the drawn digits."""
    lines = [re.sub(r"[\d,]*\.?\d+", "#", line).rstrip() for line in text.splitlines()]
    lines = [re.sub(r"(meant #, read #)(\s+\1)*", r"\1", line) for line in lines]
    return [line for line in lines if not re.fullmatch(r"[ .:\-=+*#%@]*", line)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with the scripts in it, where the README's commands follow one another."""
    folder = tmp_path_factory.mktemp("clone")
    for path in SCRIPTS:
        shutil.copy(path, folder)
    return folder


@pytest.mark.everything
@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command[:60] for command, _ in SHOWN])
def test_the_command_prints_what_is_shown(clone, command, output):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = finished(["bash", "-c", command], clone, {"PATH": path}, timeout=300)
    printed, shown = shape(job.stdout), shape(output)
    if "[...]" in shown:  # stands for lines left out
        cut = shown.index("[...]")
        assert printed[:cut] == shown[:cut]
        printed, shown = printed[-len(shown) + cut + 1 :], shown[cut + 1 :]
    assert printed == shown


def test_every_step_is_shown():
    for path in SCRIPTS:
        assert any(path.name in command for command, _ in SHOWN)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_tests_it_names_exist():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", README):
        assert f"def {name}(" in text, name
