"""The hunks between the steps of the ladder, and the notes that explain them."""

import difflib
import re
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from markdown_it import MarkdownIt
from templates import ENV

COUNTS = {3: "three", 4: "four", 5: "five", 6: "six"}  # how many lines may carry a lesson
README = "diffs/README.md"  # has a note on each hunk: what it is for
BLOCK = re.compile(r"\n```diff\n(?P<hunks>.*?)```\n", re.DOTALL)  # with which a note begins
PLAY = re.compile("^Play with it: .*\n", re.MULTILINE)
NEAR = 2  # how many unchanged lines may stand between changes that are shown together
# The parts of what stands before the notes of a step: what stands behind each.
LESSON = {"count": " lines**\n\n", "list": "\n\n", "story": ""}


class Problem(Exception):
    """An error in the notes, described in one line."""


@dataclass(eq=False)  # two hunks may read alike
class Hunk:
    header: str  # "@@ -34,11 +48,12 @@"
    lines: list  # with "-", "+" or " " in front
    note: "Note | None" = None

    @property
    def text(self):
        return "\n".join([self.header, *self.lines])

    @property
    def starts(self):
        """Its first line in each file, counted from 0."""
        return [int(number) - 1 for number in re.findall(r"[-+](\d+)", self.header)]

    @property
    def slug(self):
        """Where it is on the page: at its note if it is the first of that, else behind."""
        number = self.note.hunks.index(self)
        return f"{self.note.slug}-{number + 1}" if number else self.note.slug

    @property
    def changed(self):
        return [line for line in self.lines if line[0] in "+-"]

    def adds(self, code):
        """Return whether it adds a line that starts with this code."""
        return any(line[0] == "+" and line[1:].strip().startswith(code) for line in self.lines)


@dataclass
class Note:
    """A section of the walk: what its hunks are for or, if it has none, what belongs to all."""

    title: str
    why: str
    tests: list = field(default_factory=list)
    links: list = field(default_factory=list)  # [(title, address)]
    hunks: list = field(default_factory=list)
    shown: str = ""  # its hunks, as they stand in the README

    @property
    def slug(self):
        return anchor(self.title)

    @property
    def markdown(self):
        """The note with its hunks, under a heading."""
        return ENV.get_template("note.md.j2").render(note=self).strip()


class Diff:
    """The difference between two files, as `diff -u` writes it, and what the notes say about it."""

    def __init__(self, old, new, text=None, context=3):
        """Compare two files. If the new one is not on the disk, `text` is what it contains."""
        self.old, self.new = old, new
        self.old_lines = old.read_text(encoding="utf-8").splitlines()
        self.new_lines = (text or new.read_text(encoding="utf-8")).splitlines()
        self.hunks = []
        self.title = self.story = ""
        self.lesson = []  # [(line, why, hunk)], in the order to read them
        self.notes = []  # in the order to read them
        _, _, *lines = difflib.unified_diff(self.old_lines, self.new_lines, n=context, lineterm="")
        for line in lines:
            if line.startswith("@@"):
                self.hunks.append(Hunk(line, []))
            else:
                self.hunks[-1].lines.append(line)

    @property
    def name(self):
        return f"{self.old.name[:2]} → {self.new.name[:2]}"

    @property
    def slug(self):
        return f"{self.old.name[:2]}-to-{self.new.name[:2]}"

    @property
    def text(self):
        head = f"--- {self.old.name}\n+++ {self.new.name}\n"
        return head + "".join(hunk.text + "\n" for hunk in self.hunks)

    @property
    def opening(self):
        return f"The step in {COUNTS[len(self.lesson)]} lines"


def brief(old, new):
    """Yield the changes between the lines of two files, each with an unchanged line that shows its
    place: ("-", number of a line in the old file), ("+" or " ", number in the new one)."""
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [each for each in opcodes if each[0] != "equal"]
    near = False  # to the change before
    for (_, i1, i2, j1, j2), behind in zip_longest(changes, changes[1:]):
        until = behind[3] if behind and behind[3] - j2 <= NEAR else j2
        if not near and i1 == i2 and until == j2:
            yield " ", j1 - 1
        yield from (("-", number) for number in range(i1, i2))
        yield from (("+", number) for number in range(j1, j2))
        yield from ((" ", number) for number in range(j2, until))
        near = until > j2


# ---------------------------------------------------------------- pages in Markdown


def anchor(title):
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def sections(text):
    """Yield the sections of a page: (level of the heading, heading, what stands below it)."""
    lines = text.splitlines(keepends=True)
    tokens = MarkdownIt().parse(text)
    heads = [(*each.map, int(each.tag[1])) for each in tokens if each.type == "heading_open"]
    for (start, end, level), (until, *_) in pairwise([*heads, (len(lines),)]):
        yield level, lines[start].lstrip("#").strip(), "".join(lines[end:until])


def cut_at(text, marks, where):
    """Cut a text into parts, {name: what stands before its mark}; the last one has no mark."""
    parts = {}
    *ended, last = marks
    for name in ended:
        parts[name], found, text = text.partition(marks[name])
        if not found:
            raise Problem(f"{where}: no {marks[name].strip()!r} behind its {name}")
    return {**parts, last: text}


# ---------------------------------------------------------------- notes


def explained(root):
    """Return the diffs from each step to the next, with what diffs/README.md says of each hunk."""
    diffs = [Diff(old, new) for old, new in pairwise(sorted(root.glob("0[1-9]_*.py")))]
    named = {diff.name: diff for diff in diffs}
    for level, heading, body in sections((root / README).read_text("utf-8")):
        name, _, title = heading.partition(": ")
        if level == 2 and name in named:
            diff = named[name]
            diff.title, diff.story = title, body
        elif level == 3:
            diff.notes.append(read_note(diff, heading, body))
    for diff in diffs:
        for hunk in diff.hunks:
            if not hunk.note:
                line = hunk.changed[0]
                raise Problem(
                    f"README.md: no note on the hunk {hunk.header} of {diff.name}: {line}"
                )
        read_lesson(diff)
    return diffs


def read_note(diff, title, body):
    """Return a note from its heading and the text below it, tied to its hunks if it has any."""
    text, _, tests = re.sub(PLAY, "", body).partition("<details>")
    text, _, links = text.partition("Read more:")
    shown = re.match(BLOCK, text)
    note = Note(title, text[shown.end() if shown else 0 :].strip())
    note.tests = re.findall(r"`(test_[^`]+)`", tests)
    note.links = re.findall(r"\[([^]]+)\]\(((?:https://|\.\./)[^)]+)\)", links)
    if shown:
        note.shown = shown[0]
        for piece in re.split("^@@ .*\n", shown["hunks"], flags=re.MULTILINE):
            if piece:
                note.hunks.append(meant(diff, title, piece))
                note.hunks[-1].note = note
    return note


def meant(diff, title, piece):
    """Return the hunk of a diff with which this piece, as it was or in part, has most in common."""
    lines = {line for line in piece.splitlines() if line[:1] in ("+", "-") and line[1:].strip()}
    hunk = max(diff.hunks, key=lambda hunk: len(lines.intersection(hunk.changed)))
    if not lines.intersection(hunk.changed):
        raise Problem(f'README.md: the note "{title}" shows no hunk of {diff.name}')
    return hunk


def read_lesson(diff):
    """Find the lines that carry the lesson, each with the note on its hunk, before the story."""
    parts = cut_at(diff.story, LESSON, f"README.md: {diff.name}")
    diff.story = re.sub(PLAY, "", parts["story"]).strip()
    for code, why in re.findall(r"^\d\. \[`(.+?)`\]\(#.*?\): (.*)", parts["list"], re.MULTILINE):
        found = [hunk for hunk in diff.hunks if hunk.adds(code)]
        if len(found) != 1:
            raise Problem(f"README.md: `{code}` is in {len(found)} hunks of {diff.name}")
        diff.lesson.append((code, why, found[0]))


def refreshed(root, diffs):
    """Return diffs/README.md with its hunks, and the links to them, as the scripts are now."""
    text = (root / README).read_text("utf-8")
    for diff in diffs:
        for code, why, hunk in diff.lesson:
            link = f"[`{code}`](#{hunk.note.slug}): {why}\n"
            text = re.sub(rf"\[`{re.escape(code)}`\]\(#.*?\): .*\n", lambda _, new=link: new, text)
        for note in diff.notes:
            if note.hunks:
                hunks = "".join(f"{hunk.text}\n" for hunk in note.hunks)
                text = text.replace(note.shown, f"\n```diff\n{hunks}```\n")
    return text
