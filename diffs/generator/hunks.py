"""The hunks between the steps of the ladder, and the notes that explain them."""

import difflib
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

CONTEXT = 3  # lines around a change, as in `diff -u`


class Problem(Exception):
    """An error in the notes, described in one line."""


@dataclass
class Hunk:
    header: str  # "@@ -34,11 +48,12 @@"
    lines: list  # with "-", "+" or " " in front
    old_start: int  # the first line, counted from 0
    new_start: int
    note: "Note | None" = None

    @property
    def text(self):
        return "\n".join([self.header, *self.lines])

    @property
    def changed(self):
        return [line for line in self.lines if line[0] in "+-"]

    @property
    def old_count(self):
        """How many lines of the old file it spans, changed or not."""
        return sum(line[0] != "+" for line in self.lines)

    @property
    def new_count(self):
        return sum(line[0] != "-" for line in self.lines)

    @property
    def markdown(self):
        """The hunk with its note, under a heading."""
        return f"### {self.note.title}\n\n```diff\n{self.text}\n```\n\n{self.note.markdown}"


@dataclass
class Note:
    title: str
    anchor: str  # a changed line of the hunk that it belongs to
    why: str
    tests: list
    links: list  # [(title, address)]

    @property
    def slug(self):
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower().replace("'", "")).strip("-")

    @property
    def markdown(self):
        tests = ", ".join(f"`{test}`" for test in self.tests)
        links = ", ".join(f"[{title}]({address})" for title, address in self.links)
        return f"{self.why}\n\n*Fails without it:* {tests}<br>\n*Read more:* {links}"


@dataclass
class Diff:
    old: Path
    new: Path
    hunks: list
    title: str = ""
    story: str = ""
    old_lines: list = field(default_factory=list)
    new_lines: list = field(default_factory=list)

    @property
    def name(self):
        old, new = (path.stem.partition("_")[0] for path in (self.old, self.new))
        return f"{old} → {new}"

    @property
    def slug(self):
        return f"{self.old.name[:2]}-to-{self.new.name[:2]}"

    @property
    def text(self):
        head = f"--- {self.old.name}\n+++ {self.new.name}\n"
        return head + "".join(hunk.text + "\n" for hunk in self.hunks)


# ---------------------------------------------------------------- diffs


def ladder(root):
    """Return the paths of the steps' scripts, in order."""
    return sorted(root.glob("0[1-9]_*.py"))


def compare(old, new, text=None, context=CONTEXT):
    """Return the diff between two files, as `diff -u` writes it but without dates.

    If the new file is not on the disk, `text` is what it contains.
    """
    old_lines = old.read_text(encoding="utf-8").splitlines()
    new_lines = (text or new.read_text(encoding="utf-8")).splitlines()
    hunks = []
    for group in difflib.SequenceMatcher(None, old_lines, new_lines).get_grouped_opcodes(context):
        lines = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in old_lines[i1:i2]]
            else:
                lines += [f"-{line}" for line in old_lines[i1:i2]]
                lines += [f"+{line}" for line in new_lines[j1:j2]]
        (_, old_start, _, new_start, _), (_, _, old_end, _, new_end) = group[0], group[-1]
        header = f"@@ -{span(old_start, old_end)} +{span(new_start, new_end)} @@"
        hunks.append(Hunk(header, lines, old_start, new_start))
    return Diff(old, new, hunks, old_lines=old_lines, new_lines=new_lines)


def span(start, end):
    """Return a range of lines in a diff's notation."""
    if end - start == 1:
        return f"{start + 1}"
    return f"{start + (end > start)},{end - start}"


# ---------------------------------------------------------------- notes


def explained(root):
    """Return the diffs from each step to the next, with the note of each hunk."""
    diffs = [compare(old, new) for old, new in pairwise(ladder(root))]
    sections = parse((root / "diffs" / "notes.md").read_text(encoding="utf-8"))
    names = [diff.name for diff in diffs]
    for name in sections:
        if name not in names:
            raise Problem(f'notes.md: there is no diff "{name}", only {", ".join(names)}')
    for diff in diffs:
        if diff.name not in sections:
            raise Problem(f'notes.md: no section on {diff.name}: add "## {diff.name}: TITLE"')
        diff.title, diff.story, notes = sections[diff.name]
        tie(diff, notes)
    return diffs


def parse(text):
    """Return {name of the diff: (title, story, notes)} from the text of notes.md."""
    sections = {}
    for heading, body in cut(text, "## "):
        name, _, title = heading.partition(": ")
        story, *_ = re.split(r"^### ", body, maxsplit=1, flags=re.MULTILINE)
        sections[name] = title, story.strip(), [read_note(*part) for part in cut(body, "### ")]
    return sections


def cut(text, mark):
    """Cut a text at the headings that begin with this mark: [(heading, body)]."""
    parts = re.split(rf"^{mark}", text, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0].strip(), part.partition("\n")[2]) for part in parts]


NOTE = re.compile(
    r"\s*```diff\n(?P<anchor>[+-].*)\n```\n+"
    r"(?P<why>.+?)\n\n"
    r"Fails without it: (?P<tests>.+)\n"
    r"Read more: (?P<links>.+)\s*",
    re.DOTALL,
)


def read_note(title, body):
    """Return a note from its heading and the text below it."""
    match = NOTE.fullmatch(body)
    if not match:
        raise Problem(
            f'notes.md: the note "{title}" needs a line of its hunk in a diff block, the reason, '
            "a line `Fails without it: ` and a line `Read more: `"
        )
    tests = re.findall(r"`(test_[^`]+)`", match["tests"])
    links = re.findall(r"\[([^]]+)\]\(((?:https://|\.\./)[^)]+)\)", match["links"])
    if not tests or not links:
        raise Problem(f'notes.md: the note "{title}" names no {"links" if tests else "tests"}')
    return Note(title, match["anchor"], match["why"].strip(), tests, links)


def tie(diff, notes):
    """Attach the notes to the hunks: one to each."""
    for note in notes:
        found = [hunk for hunk in diff.hunks if note.anchor in hunk.changed]
        if len(found) != 1:
            where = f"in {len(found)} hunks" if found else "in no hunk"
            raise Problem(f'notes.md: the line of "{note.title}" is {where} of {diff.name}')
        (hunk,) = found
        if hunk.note:
            titles = f'"{hunk.note.title}" and "{note.title}"'
            raise Problem(f"notes.md: {titles} are on the same hunk of {diff.name}")
        hunk.note = note
    for hunk in diff.hunks:
        if not hunk.note:
            line = hunk.changed[0]
            raise Problem(f"notes.md: no note on the hunk {hunk.header} of {diff.name}: {line}")
    slugs = [hunk.note.slug for hunk in diff.hunks]
    for slug in slugs:
        if slugs.count(slug) > 1:
            raise Problem(f"notes.md: two notes of {diff.name} share the anchor #{slug}")
