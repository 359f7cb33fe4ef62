"""The recipes and pitfalls: patches on the scripts, each with a note above its diff."""

import re
from dataclasses import dataclass

from hunks import Diff, Problem, compare


@dataclass
class Kind:
    title: str
    story: str
    limit: int  # how many lines may change


KINDS = {
    "recipes": Kind(
        "Recipes: what to do next",
        """\
Each recipe is a small patch on one of the five scripts. The command beside it writes the patched
script to a new file and runs it. That file is standalone, too, and yours to copy. A test shows what
the recipe says: `pytest --everything -k 'NAME'`.""",
        30,
    ),
    "pitfalls": Kind(
        "Pitfalls: what goes wrong, often in silence",
        """\
Each pitfall is a small patch that breaks one of the five scripts. Most of the broken scripts train
on without a word. The command beside it writes the broken script to a new file and runs it. A test
shows the symptom in the broken script, and not in ours: `pytest --everything -k 'NAME'`.""",
        12,
    ),
}
STANDALONE = "torchrun --standalone --nproc-per-node=2"
ROW = re.compile(r"Symptom: (.+)\nCause: (.+)\nRemedy: (.+)\n")
FORM = re.compile(
    r"# (?P<title>.+)\n\n"
    r"(?P<rows>(?:Symptom: .+\nCause: .+\nRemedy: .+\n\n)*)"
    r"(?P<why>(?s:.+?))\n\n"
    r"(?:First: `(?P<first>.+)`\n)?"
    r"Shown by: (?P<tests>.+)\n"
    r"Read more: (?P<links>.+)\n\n"
    r"--- (?P<old>.+)\n\+\+\+ (?P<new>.+)\n"
    r"(?P<hunks>@@(?s:.+))"
)


@dataclass
class Patch:
    kind: str
    name: str
    title: str
    rows: list  # of the table of symptoms: [(symptom, cause, remedy)]
    why: str
    first: str | None  # a command to run before it
    tests: list
    links: list  # [(title, address)]
    old: str  # the script it applies to, and the name of the patched one
    new: str
    diff: Diff
    head: str  # the file's text above the diff

    @property
    def slug(self):
        return f"{self.kind[:-1]}-{self.name.replace('_', '-')}"

    @property
    def path(self):
        """The file, relative to the folder of the diffs."""
        return f"{self.kind}/{self.name}.diff"

    @property
    def text(self):
        hunks = "".join(f"{hunk.text}\n" for hunk in self.diff.hunks)
        return f"{self.head}--- {self.old}\n+++ {self.new}\n{hunks}"

    @property
    def result(self):
        """The patched script."""
        return "\n".join([*self.diff.new_lines, ""])

    @property
    def command(self):
        """The command that writes the patched script and runs it, at the top of the repository."""
        start = "python" if self.old[:2] in ("01", "02") else STANDALONE
        start = "sbatch" if self.new.endswith(".sbatch") else start
        first = f"{self.first} &&\n    " if self.first else ""
        write = f"patch -o {self.new} {self.old} diffs/{self.path}"
        return f"{first}{write} &&\n    {start} {self.new}"

    @property
    def markdown(self):
        """The note."""
        tests = ", ".join(f"`{test}`" for test in self.tests)
        links = ", ".join(f"[{title}]({address})" for title, address in self.links)
        seen = "".join(f"*What you see:* {symptom}<br>\n" for symptom, _, _ in self.rows)
        seen = f"{seen}*Remedy:* {self.rows[0][2]}\n\n" if self.kind == "pitfalls" else ""
        return f"{seen}{self.why}\n\n*Shown by:* {tests}<br>\n*Read more:* {links}"

    @property
    def changed(self):
        return sum(len(hunk.changed) for hunk in self.diff.hunks)


def patches(root, kind):
    """Return all patches of this kind, by name."""
    return [read(root, path) for path in sorted((root / "diffs" / kind).glob("*.diff"))]


def symptoms(collections):
    """Return the table of symptoms, those with a text to search for first.

    A row is (symptom, cause, remedy, patch).
    """
    order = collections["pitfalls"] + collections["recipes"]
    rows = [(*row, patch) for patch in order for row in patch.rows]
    return sorted(rows, key=lambda row: "`" not in row[0])


def read(root, path):
    """Return the patch in this file, its line numbers brought up to date."""
    text = path.read_text(encoding="utf-8")
    where = f"{path.parent.name}/{path.name}"
    match = FORM.fullmatch(text)
    if not match:
        raise Problem(f"{where}: not in the form of the others: # title, note, Shown by, diff")
    old, new = root / match["old"], root / match["new"]
    if not old.exists():
        raise Problem(f"{where}: there is no {match['old']} to patch")
    try:
        result = apply(old.read_text(encoding="utf-8").splitlines(), match["hunks"].splitlines())
    except LookupError as error:
        raise Problem(f"{where}: no longer applies to {old.name}: {error}") from error
    patch = Patch(
        kind=path.parent.name,
        name=path.stem,
        title=match["title"],
        rows=ROW.findall(match["rows"]),
        why=match["why"],
        first=match["first"],
        tests=re.findall(r"`(test_[^`]+)`", match["tests"]),
        links=re.findall(r"\[([^]]+)\]\((https://[^)]+)\)", match["links"]),
        old=match["old"],
        new=match["new"],
        diff=compare(old, new, "\n".join([*result, ""])),
        head=text[: match.start("old") - len("--- ")],
    )
    check(patch, where)
    return patch


def check(patch, where):
    """Raise Problem if something is missing, or too much."""
    limit = KINDS[patch.kind].limit
    if patch.changed > limit:
        raise Problem(f"{where}: changes {patch.changed} lines, {limit} are allowed")
    if not patch.tests or not patch.links:
        raise Problem(f"{where}: names no {'links' if patch.tests else 'tests'}")
    if patch.kind == "pitfalls" and not patch.rows:
        raise Problem(f"{where}: has no symptom")


def apply(lines, hunks):
    """Return the lines with the hunks applied, each where its old lines are found.

    Several places may fit: the one nearest to the hunk's line number is taken. LookupError says
    which hunk fits nowhere.
    """
    result, done = [], 0
    for header, body in split(hunks):
        before = [line[1:] for line in body if line[:1] != "+"]
        after = [line[1:] for line in body if line[:1] != "-"]
        fits = [
            start
            for start in range(done, len(lines) - len(before) + 1)
            if lines[start : start + len(before)] == before
        ]
        if not fits:
            raise LookupError(header)
        number = int(re.search(r"\d+", header)[0]) - 1
        start = min(fits, key=lambda start: abs(start - number))
        result += [*lines[done:start], *after]
        done = start + len(before)
    return [*result, *lines[done:]]


def split(lines):
    """Split the lines of a diff into its hunks: [(header, lines)]."""
    found = []
    for line in lines:
        if line.startswith("@@"):
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found
