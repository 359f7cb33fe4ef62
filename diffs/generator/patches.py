"""The recipes and pitfalls: pages in Markdown, each of which is also a patch on a script."""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from hunks import Diff, Problem, cut_at

KINDS = ("recipes", "pitfalls")
NOT_PATCHES = ("README",)
GPT = "exercise/solution.py"
LIMITS = {"recipes": 40, "pitfalls": 15, GPT: 95}  # how many lines may change
WIDTH = 95  # of a forge's column
# What a page says below its command: what that writes, and what to type with fewer GPUs than ranks.
BELOW = ("[One GPU?", "With one GPU", "[Fewer than four GPUs?", "This writes the *broken*")
BREAKS = "\n\nWhat breaks it:"
TESTS = "\n\n<details>\n<summary>Tests</summary>\n\n"  # behind the advice, if they have other names
ROW = r"\]\((\w+)\.md\)"  # in a table of the README.md of a kind
PARTS = {  # of a page, in their order: what stands behind each
    "title": "\n\n",
    "opening": "\n\n```bash\n",  # of a recipe its purpose, of a pitfall the table of its symptoms
    "command": "\n```\n\n",
    "explanation": "\n\n```diff\n",
    "patch": "\n```\n\n",
    "advice": "\n\nRead more: ",
    "links": "",
}


class Patch:
    """A page, and the script that it makes."""

    def __init__(self, root, path):
        self.kind, self.name = path.parent.name, path.stem
        self.path = f"{self.kind}/{path.name}"  # from the top of the repository
        self.slug = f"{self.kind[:-1]}-{self.name.replace('_', '-')}"
        text = path.read_text(encoding="utf-8")
        parts = cut_at(text, PARTS, self.path)
        self.title = parts["title"].removeprefix("# ")
        self.purpose = "" if parts["opening"].startswith("|") else parts["opening"]
        self.command = parts["command"]  # writes the patched script, and runs it
        paragraphs = parts["explanation"].removesuffix(BREAKS).split("\n\n")
        self.below = [*takewhile(lambda each: each.startswith(BELOW), paragraphs)]
        self.why = "\n\n".join(paragraphs[len(self.below) :])
        advice, _, named = parts["advice"].partition(TESTS)
        table, _, self.advice = advice.rpartition("|\n\n")
        self.rows = [*cells(parts["opening"]), *cells(table)]  # [(symptom, cause, remedy)]
        self.tests = re.findall(r"`(test_[^`]+)`", named) or tests_of(root, self.name)
        self.links = re.findall(r"\[([^]]+)\]\((https://[^)]+)\)", parts["links"])
        # The script that it applies to, and the name of the patched one, behind --- and +++.
        self.old, self.new, *_ = (line[4:] for line in parts["patch"].splitlines())
        with original(root, self.old) as script:
            self.result = patched(script, path)
            self.diff = Diff(script, root / self.new, self.result, context=1)
        for problem in self.problems():
            raise Problem(f"{self.path}: {problem}")
        hunks = [hunk.text for hunk in self.diff.hunks]
        patch = "\n".join([f"--- {self.old}", f"+++ {self.new}", *hunks])
        self.text = text.replace(parts["patch"], patch)  # with its hunks brought up to date

    @property
    def index_row(self):
        """Its row in the README.md of its kind."""
        link = f"[{self.title}]({self.name}.md)"
        if self.kind == "recipes":
            return f"| {link} | {' '.join(self.purpose.split())} |\n"
        seen = self.rows[0][0].removeprefix("No error. ")
        return f"| {seen} | {link} |\n"

    def problems(self):
        """Yield what is missing, or too much."""
        limit = LIMITS.get(self.old, LIMITS[self.kind])
        changed = sum(len(hunk.changed) for hunk in self.diff.hunks)
        if changed > limit:
            yield f"changes {changed} lines, {limit} are allowed"
        for name in ("tests", "links", "purpose" if self.kind == "recipes" else "rows"):
            if not getattr(self, name):
                yield f"has no {name}"
        if any(re.match("The same(,|$)", cell) for row in self.rows for cell in row):
            yield "a row says 'The same', and the search shows it alone"
        if self.kind == "pitfalls" and "*broken*" not in "".join(self.below):
            yield "does not say below its command that this writes the *broken* script"
        if max(map(len, self.command.splitlines())) > WIDTH:
            yield f"a line of its command has more than {WIDTH} characters"
        typed = " ".join(self.command.replace("\\\n", "").split())
        written = f"patch -o {self.new} {self.old} {self.path} && "
        if not re.search(rf"{written}.*\b{self.new}", typed):
            yield f"its command does not end with {written!r} and what runs it"


# ---------------------------------------------------------------- the pages


def readme(root, kind):
    return (root / kind / "README.md").read_text(encoding="utf-8")


def index(text, pages):
    """Return the README.md of a kind with the rows of its tables brought up to date."""
    rows = {page.name: page.index_row for page in pages}

    def written(table):
        return "".join(rows[name] for name in dict.fromkeys(re.findall(ROW, table[0])))

    return re.sub(rf"(?:^\|.*{ROW}.*\n)+", written, text, flags=re.MULTILINE)


def collect(root, kind):
    """Return all pages of this kind, in the order of their README.md."""
    names = dict.fromkeys(re.findall(ROW, readme(root, kind)))
    pages = {path.stem: path for path in (root / kind).glob("*.md")}
    for name in sorted({*names} ^ ({*pages} - {*NOT_PATCHES})):
        raise Problem(f"{kind}/{name}.md: not there, or in no table of {kind}/README.md")
    return [Patch(root, pages[name]) for name in names]


def tests_of(root, name):
    """Return the tests with the name of a page: functions of that name, or else parameters."""
    texts = [path.read_text(encoding="utf-8") for path in root.glob("*/tests/test_*.py")]
    shared = "test_pitfall", "test_trains_like_ddp"
    return [f"test_{name}" for text in texts if f"def test_{name}(" in text] or [
        f"{test}[{name}]"
        for test in shared
        for text in texts
        if f"def {test}(" in text and f'"{name}"' in text
    ]


def cells(text):
    """Return the cells of the rows of a table in Markdown, without its heading."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [tuple(row.strip("| ").split(" | ")) for row in rows[2:]]


@contextmanager
def original(root, name):
    """Give the path of the script that a page patches. A recipe of this name may write it."""
    page = root / "recipes" / f"{Path(name).stem}.md"
    if (root / name).exists() or not page.exists():
        yield root / name
        return
    before = re.search(r"^--- (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder, original(root, before) as script:
        path = Path(folder, name)
        path.write_text(patched(script, page), encoding="utf-8")
        yield path


def patched(script, page):
    """Return the text of a script to which this page is applied as a patch."""
    words = ["patch", "--fuzz=0", "--force", "--reject-file=-", "--output=-", script, page]
    place = tempfile.gettempdir()  # patch writes a file of its own there, for a moment
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=place)
    if result.returncode:
        said = " ".join(result.stderr.split())
        raise Problem(f"{page.parent.name}/{page.name}: no longer applies to {script.name}: {said}")
    return result.stdout
