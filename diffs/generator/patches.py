"""The recipes and pitfalls: pages in Markdown, each of which is also a patch on a script."""

import re
import subprocess
import tempfile
from pathlib import Path

from hunks import DETAILS, Diff, Problem, split_words

KINDS = RECIPES, PITFALLS = "more/recipes", "more/pitfalls"
NOT_PATCHES = ("README",)
GPT = "more/exercise/solution.py"
LIMITS = {RECIPES: 40, PITFALLS: 15, GPT: 95}  # number of lines that may change
SHARED = "test_pitfall", "test_trains_like_ddp"  # tests with a page as their parameter
WIDTH = 95  # number of characters that fit into the column in which GitHub shows a page
COMMAND = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)  # a page's first command runs its script
PATCH = re.compile(r"\n(?:What breaks it:\n\n)?```diff\n(.*?)\n```\n", re.DOTALL)
ROW = r"\]\((\w+)\.md\)"  # a link in a table of more/recipes/README.md or more/pitfalls/README.md


class Patch:
    """A page of recipes or pitfalls, and the script that its patch produces."""

    def __init__(self, root, kind, path):
        self.kind, self.name = kind, path.stem
        self.path = f"{kind}/{path.name}"  # from the top of the repository
        self.slug = f"{path.parent.name[:-1]}-{self.name.replace('_', '-')}"
        text = path.read_text(encoding="utf-8")
        title, _, below = text.partition("\n")
        self.title = title.removeprefix("# ")
        self.words, below = split_words(below)
        self.opening = below.strip().partition("\n\n")[0]  # purpose, or a pitfall's symptoms
        (patch,) = PATCH.findall(text) or [""]
        (self.command, *_) = COMMAND.findall(text) or [""]
        if not patch.startswith("--- ") or not self.command:
            raise Problem(f"{self.path}: has no command, or not exactly one patch")
        listed = re.findall(r"`(test_[^`]+)`", "".join(DETAILS.findall(text)))
        self.tests = listed or tests_of(root, self.name)
        self.text_without_patch = DETAILS.sub("", PATCH.sub("", below)).strip()
        # The names after --- and +++: the script that it applies to, and the patched script.
        self.old, self.new, *_ = (line[4:] for line in patch.splitlines())
        script = source(root, self.old)
        self.result = patched(script, path)
        self.diff = Diff(root / self.old, root / self.new, (script, self.result), context=1)
        for fault in self.faults():
            raise Problem(f"{self.path}: {fault}")
        hunks = [hunk.text for hunk in self.diff.hunks]
        fresh = "\n".join([f"--- {self.old}", f"+++ {self.new}", *hunks])
        self.text = text.replace(patch, fresh)

    @property
    def index_row(self):
        """Its row in the README.md of recipes or of pitfalls."""
        link = f"[{self.title}]({self.name}.md)"
        if self.kind == RECIPES:
            return f"| {link} | {' '.join(self.opening.split())} |\n"
        symptom, *_ = self.opening.splitlines()[2].strip("| ").split(" | ")
        return f"| {symptom.removeprefix('No error. ')} | {link} |\n"

    def faults(self):
        """Yield what the page lacks, and what is too long."""
        limit = LIMITS.get(self.old, LIMITS[self.kind])
        changed = sum(len(hunk.changed) for hunk in self.diff.hunks)
        if changed > limit:
            yield f"changes {changed} lines, {limit} are allowed"
        if not self.tests:
            yield "has no tests"
        if self.opening.startswith("|") != (self.kind == PITFALLS):
            yield "does not begin with its purpose, or a pitfall with a table of symptoms"
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
    """Return the README.md of recipes or of pitfalls with the rows of its tables up to date."""
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
    return [Patch(root, kind, pages[name]) for name in names]


def tests_of(root, name):
    """Return the tests of a page: the one with its name, or those that get it as a parameter."""
    texts = [path.read_text(encoding="utf-8") for path in root.glob("more/*/tests/test_*.py")]
    if any(f"def test_{name}(" in text for text in texts):
        return [f"test_{name}"]
    cases = [text for text in texts if f'"{name}"' in text]
    return [f"{test}[{name}]" for test in SHARED if any(f"def {test}(" in text for text in cases)]


def source(root, name):
    """Return the text of the script that a page patches. Another recipe may produce it."""
    page = root / RECIPES / f"{Path(name).stem}.md"
    if (root / name).exists() or not page.exists():
        return (root / name).read_text(encoding="utf-8")
    before = re.search(r"^--- (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
    return patched(source(root, before), page)


def patched(script, page):
    """Return the text of a script after applying this page as a patch."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        options = ["--fuzz=0", "--force", "--reject-file=-", "--output=-"]
        words, folder = ["patch", *options, file.name, page], Path(file.name).parent
        result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    if result.returncode:
        error = " ".join(result.stderr.split())
        raise Problem(f"{Path(*page.parts[-3:])}: no longer applies: {error}")
    return result.stdout
