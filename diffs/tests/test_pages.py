"""What the pages name exists."""

import html
import re
from pathlib import Path

import hunks
import pytest
from support import server
from support.jobs import finished
from support.scripts import ROOT, SCRIPTS

PYTEST = Path(pytest.__file__).with_name("__main__.py")
PAGES = [ROOT / "README.md", *ROOT.glob("[!.]*/**/*.md"), ROOT / "diffs" / "index.html"]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}


def anchors(text):
    """Return what a link to a page with this text may name after its #."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {*map(hunks.anchor, titles), *re.findall(r'id="([^"]+)"', text)}


def test_links_lead_somewhere():
    known = {path: anchors(text) for path, text in TEXTS.items()}
    broken = []
    for page, text in TEXTS.items():
        pattern = r'href="([^"$]+)"' if page.suffix == ".html" else r"\]\(([^)\s]+)\)"
        for link in map(html.unescape, re.findall(pattern, text)):
            name, _, anchor = link.partition("#")
            path = (page.parent / name).resolve() if name else page
            leads = path.exists() and (not anchor or anchor in known[path])
            if not leads and not re.match("https?:|mailto:", link):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    steps = {name for text in TEXTS.values() for name in re.findall(r"\b0\d_\w+\.py", text)}
    assert not broken and steps == {path.name for path in SCRIPTS}, (steps, broken)


def test_the_tests_that_pages_name_exist():
    """A name stands between backticks, perhaps with the parameters of one case behind it."""
    files = [*ROOT.glob("[!.]*/**/test_*.py")]
    names = {path.stem for path in files}
    for path in files:
        names |= {*re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    named = {name for text in TEXTS.values() for name in re.findall(r"`(test_\w+)[`\[]", text)}
    assert named <= names, named - names


@pytest.mark.slow
@pytest.mark.parametrize(("number", "folder"), [(0, "."), (1, "more/recipes/tests")])
def test_the_tests_that_contributors_copy_pass(number, folder, tmp_path):
    """With the fixtures of the folder that they go into."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXTS[ROOT / "tests" / "README.md"], re.M | re.S)
    (tmp_path / "test_printed.py").write_text(blocks[number], encoding="utf-8")
    (tmp_path / "conftest.py").symlink_to(ROOT / folder / "conftest.py")
    options = ["-m", "", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    job = finished(server.command(PYTEST, *options, "test_printed.py"), tmp_path)
    assert "1 passed" in job.stdout
