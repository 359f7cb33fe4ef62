"""What the pages in Markdown name exists, and the README shows what its commands print."""

import re
import shutil

import hunks
import pytest
from support.jobs import finished
from support.results import shape
from support.scripts import ON_PATH, ROOT, SCRIPTS

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("lookup", "recipes", "pitfalls")
PAGES = {ROOT / "README.md", *ROOT.glob("[!.]*/README.md"), *ROOT.glob("slurm/*/README.md")}
PAGES = sorted(PAGES | {path for room in ROOMS for path in ROOT.glob(f"{room}/*.md")})
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}


def anchors(path):
    """Return what a link to this page may name after its #."""
    text = TEXTS.get(path) or path.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {*map(hunks.anchor, titles), *re.findall(r'id="([^"]+)"', text)}


def test_links_lead_somewhere():
    broken = []
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_the_tests_that_pages_name_exist():
    """A name stands between backticks, perhaps with the parameters of one case behind it."""
    files = [path for path in ROOT.glob("**/tests/**/test_*.py") if ".venv" not in path.parts]
    files += ROOT.glob("tests/test_*.py")
    names = {path.stem for path in files}
    for path in files:
        names |= {*re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    named = [
        (str(page.relative_to(ROOT)), name)
        for page, text in TEXTS.items()
        for name in re.findall(r"`(test_\w+)[`\[]", text)
    ]
    missing = [f"{page}: {name}" for page, name in named if name not in names]
    assert not missing, "\n".join(missing)


def test_what_starts_two_ranks_says_what_to_type_with_one_gpu():
    """But for what `srun` starts, to which Slurm gives GPUs, and for a reader's own train.py."""
    start = re.compile(r"^(?!.*srun|.* train\.py).*torchrun .*-node=2 .*\.py", re.MULTILINE)
    silent = [
        str(page.relative_to(ROOT))
        for page, text in TEXTS.items()
        if start.search(text) and "CUDA_VISIBLE_DEVICES=" not in text
    ]
    assert not silent, "\n".join(silent)


@pytest.mark.weekly("trains for minutes what tests/ trains anyway, with the README's own words")
def test_the_commands_print_what_is_shown(tmp_path):
    """A line of three dots stands for any number of lines."""
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    blocks = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert blocks
    for shown in [shown for block in blocks for shown in block.split("$ ")[1:]]:
        command, _, output = shown.partition("\n")
        job = finished(["bash", "-c", command], tmp_path, ON_PATH)
        lines = ["(.*\n)*" if line == "..." else f"{re.escape(line)}\n" for line in shape(output)]
        assert re.fullmatch("".join(lines), "\n".join([*shape(job.stdout), ""])), job
        wanted = results(output)
        assert results(job.stdout)[-len(wanted) :] == pytest.approx(wanted, rel=0.03)  # CPUs differ


def results(text):
    """Return the losses and the accuracy in an output, as numbers."""
    return [float(number) for number in re.findall(r"(?:loss|accuracy) ([\d.]+)", text)]
