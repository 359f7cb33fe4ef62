"""The READMEs show what their commands print, and what they name exists."""

import re
import shutil

import pytest
from support.jobs import finished
from support.results import shape
from support.scripts import ON_PATH, ROOT, SCRIPT, SCRIPTS

MARKS = (("-", "01"), ("+", "03"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/README.md"))]
ROOMS = ("lookup", "recipes", "pitfalls")
PAGES += sorted({path for room in ROOMS for path in ROOT.glob(f"{room}/*.md")} - {*PAGES})
README = PAGES[0].read_text(encoding="utf-8")
SHOWN = re.findall(r"^```console\n\$ (.+)\n((?:.*\n)*?)```$", README, re.MULTILINE)


def results(text):
    """Return the losses and the accuracy in an output, as numbers."""
    return [float(number) for number in re.findall(r"(?:loss|accuracy) ([\d.]+)", text)]


@pytest.fixture
def clone(tmp_path):
    """A folder with the scripts, where the README's commands run one after another."""
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.weekly
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name[:2])
def test_the_command_prints_what_is_shown(clone, path):
    """A line of three dots stands for any number of lines."""
    for command, output in SHOWN:
        if path.name not in command:
            continue
        job = finished(["bash", "-c", command], clone, ON_PATH)
        lines = ["(.*\n)*" if line == "..." else f"{re.escape(line)}\n" for line in shape(output)]
        assert re.fullmatch("".join(lines), "\n".join([*shape(job.stdout), ""])), job
        shown = results(output)
        assert results(job.stdout)[-len(shown) :] == pytest.approx(shown, rel=0.03)  # CPUs differ


def test_every_step_is_shown():
    for path in SCRIPTS:
        assert any(path.name in command for command, _ in SHOWN)


def test_the_lines_that_ddp_takes_are_those_of_the_scripts():
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    texts = {mark: SCRIPT[step].read_text(encoding="utf-8").splitlines() for mark, step in MARKS}
    for line in shown.splitlines():
        assert line[0] == " " or line[1:] in texts[line[0]], line
    assert {line[0] for line in shown.splitlines()} == {" ", *texts}


def test_the_way_in_is_short():
    assert len(README.splitlines()) <= 350


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_starts_two_ranks_says_what_to_type_with_one_gpu(page):
    """What `srun` starts is left out: there, Slurm gives each rank a GPU."""
    text = page.read_text(encoding="utf-8")
    starts = re.findall(r"^(?!.*srun).*torchrun .*--nproc-per-node=2 .*\.py", text, re.M)
    assert not starts or "CUDA_VISIBLE_DEVICES=" in text, starts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings
            ]
            assert anchor in anchors or f'id="{anchor}"' in path.read_text("utf-8"), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_it_names_exist(page):
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)[`\[]", page.read_text(encoding="utf-8")):
        assert f"def {name}(" in tests or (ROOT / "tests" / f"{name}.py").exists(), name
