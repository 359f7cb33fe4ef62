"""The hunks between the steps of the ladder, and the notes that explain them."""

import difflib
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

COUNTS = {3: "three", 4: "four", 5: "five", 6: "six"}  # how many lines may carry a lesson
# The parts of a note, and of what stands before the notes of a step: what stands behind each.
NOTE = {"diff": "```diff\n", "anchor": "\n```\n", "why": "Read more: ", "links": ""}
LESSON = {"count": " lines**\n\n", "list": "\n\n", "story": ""}


def anchor(title):
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


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
    def changed(self):
        return [line for line in self.lines if line[0] in "+-"]

    def adds(self, code):
        """Return whether it adds a line that starts with this code."""
        return any(line[0] == "+" and line[1:].strip().startswith(code) for line in self.lines)


@dataclass
class Note:
    """A section of the walk: what its hunk is for or, if it has none, what belongs to all."""

    title: str
    why: str
    anchor: str = ""  # a changed line of the hunk
    tests: list = field(default_factory=list)
    links: list = field(default_factory=list)  # [(title, address)]
    hunk: Hunk | None = None

    @property
    def slug(self):
        return anchor(self.title)

    @property
    def markdown(self):
        """The note with its hunk, under a heading."""
        parts = [f"### {self.title}", self.why]
        if self.hunk:
            links = ", ".join(f"[{title}]({address})" for title, address in self.links)
            parts = [parts[0], f"```diff\n{self.hunk.text}\n```", self.why, f"Read more: {links}"]
        if self.tests:
            tests = ", ".join(f"`{test}`" for test in self.tests)
            parts += [
                "<details>\n<summary>Tests that fail without it</summary>",
                tests,
                "</details>",
            ]
        return "\n\n".join(parts)


@dataclass
class Diff:
    old: Path
    new: Path
    old_lines: list
    new_lines: list
    hunks: list
    title: str = ""
    story: str = ""
    lesson: list = field(default_factory=list)  # [(line, why, note)], in the order to read them
    notes: list = field(default_factory=list)  # in the order to read them

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

    def short(self, anchor=anchor):
        """Return the lesson in Markdown; `anchor` turns the heading above a note into an anchor."""
        items = [
            f"{number}. [`{code}`](#{anchor(note.title)}): {why}"
            for number, (code, why, note) in enumerate(self.lesson, 1)
        ]
        return "\n".join([f"**{self.opening}**", "", *items])


# ---------------------------------------------------------------- diffs


def ladder(root):
    """Return the paths of the steps' scripts, in order."""
    return sorted(root.glob("0[1-9]_*.py"))


def compare(old, new, text=None, context=3):
    """Return the diff between two files, as `diff -u` writes it but without dates.

    If the new file is not on the disk, `text` is what it contains.
    """
    old_lines = old.read_text(encoding="utf-8").splitlines()
    new_lines = (text or new.read_text(encoding="utf-8")).splitlines()
    hunks = []
    _, _, *lines = difflib.unified_diff(old_lines, new_lines, n=context, lineterm="")
    for line in lines:
        if line.startswith("@@"):
            hunks.append(Hunk(line, []))
        else:
            hunks[-1].lines.append(line)
    return Diff(old, new, old_lines, new_lines, hunks)


# ---------------------------------------------------------------- notes


def explained(root):
    """Return the diffs from each step to the next, with the note of each hunk."""
    diffs = [compare(old, new) for old, new in pairwise(ladder(root))]
    sections = parse((root / "diffs" / "notes.md").read_text(encoding="utf-8"))
    if (names := [diff.name for diff in diffs]) != [*sections]:
        raise Problem(f"notes.md: its sections are {', '.join(sections)}, not {', '.join(names)}")
    for diff in diffs:
        diff.title, story, notes = sections[diff.name]
        tie(diff, notes)
        diff.lesson, diff.story = read_lesson(diff, story)
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


def cut_at(text, marks, where):
    """Cut a text into parts, {name: what stands before its mark}; the last one has no mark."""
    parts = {}
    *ended, last = marks
    for name in ended:
        parts[name], found, text = text.partition(marks[name])
        if not found:
            raise Problem(f"{where}: no {marks[name].strip()!r} behind its {name}")
    return {**parts, last: text}


def read_note(title, body):
    """Return a note from its heading and the text below it."""
    if "```diff" not in body:
        return Note(title, body.strip())
    where = f'notes.md: the note "{title}"'
    parts = cut_at(body, NOTE, where)
    why, _, tests = parts["why"].partition("Fails without it: ")
    found = re.findall(r"`(test_[^`]+)`", tests)
    links = re.findall(r"\[([^]]+)\]\(((?:https://|\.\./)[^)]+)\)", parts["links"])
    if not links or (tests and not found):
        raise Problem(f"{where} names no {'tests' if links else 'links'}")
    return Note(title, why.strip(), parts["anchor"], found, links)


def read_lesson(diff, text):
    """Return the lines that carry the lesson, each with the note on its hunk, and the story."""
    parts = cut_at(text, LESSON, f"notes.md: {diff.name}")
    lesson = []
    for item in re.split(r"^- ", parts["list"], flags=re.MULTILINE)[1:]:
        code, _, why = item.removeprefix("`").partition("`: ")
        hunk = single([hunk for hunk in diff.hunks if hunk.adds(code)], f"`{code}`", diff)
        lesson.append((code, " ".join(why.split()), hunk.note))
    return lesson, parts["story"].strip()


def single(found, line, diff):
    """Return the only hunk that was found with this line."""
    if len(found) != 1:
        raise Problem(f"notes.md: {line} is in {len(found)} hunks of {diff.name}")
    return found[0]


def tie(diff, notes):
    """Attach the notes to the hunks: one to each."""
    diff.notes = notes
    for note in notes:
        if note.anchor:
            found = [hunk for hunk in diff.hunks if note.anchor in hunk.changed and not hunk.note]
            note.hunk = single(found, f'the line of "{note.title}"', diff)
            note.hunk.note = note
    for hunk in diff.hunks:
        if not hunk.note:
            line = hunk.changed[0]
            raise Problem(f"notes.md: no note on the hunk {hunk.header} of {diff.name}: {line}")
