"""The hunks between the steps of the ladder, and the notes that explain them."""

import difflib
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

CONTEXT = 3  # lines around a change, as in `diff -u`
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
    def new_count(self):
        return sum(line[0] != "-" for line in self.lines)

    def adds(self, code):
        """Return whether it adds a line that starts with this code."""
        return any(line[0] == "+" and line[1:].strip().startswith(code) for line in self.lines)

    @property
    def slug(self):
        return self.note.slug

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
        return anchor(self.title)

    @property
    def markdown(self):
        links = ", ".join(f"[{title}]({address})" for title, address in self.links)
        text = f"{self.why}\n\nRead more: {links}"
        if not self.tests:
            return text
        tests = ", ".join(f"`{test}`" for test in self.tests)
        fold = f"<summary>Tests that fail without it</summary>\n\n{tests}\n\n"
        return f"{text}\n\n<details>\n{fold}</details>"


@dataclass
class Aside:
    """A section of the walk that belongs to no hunk."""

    title: str
    text: str

    @property
    def slug(self):
        return anchor(self.title)

    @property
    def markdown(self):
        return f"### {self.title}\n\n{self.text}"


@dataclass
class Line:
    """A line that carries the lesson of its step."""

    code: str  # the line, or the start of it
    why: str
    note: Note  # on the hunk that adds it


@dataclass
class Diff:
    old: Path
    new: Path
    hunks: list
    title: str = ""
    story: str = ""
    lesson: list = field(default_factory=list)  # its lines, in the order to read them
    told: list = field(default_factory=list)  # hunks and asides, in the order to read them
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

    @property
    def opening(self):
        return f"The step in {COUNTS[len(self.lesson)]} lines"

    def short(self, anchor=anchor):
        """Return the lesson in Markdown; `anchor` turns the heading above a note into an anchor."""
        items = [
            f"{number}. [`{line.code}`](#{anchor(line.note.title)}): {line.why}"
            for number, line in enumerate(self.lesson, 1)
        ]
        return "\n".join([f"**{self.opening}**", "", *items])


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
    if (names := [diff.name for diff in diffs]) != [*sections]:
        raise Problem(f"notes.md: its sections are {', '.join(sections)}, not {', '.join(names)}")
    for diff in diffs:
        diff.title, story, notes = sections[diff.name]
        tie(diff, notes)
        diff.lesson, diff.story = read_lesson(diff, story)
    slugs = [part.slug for diff in diffs for part in diff.told]
    for slug in slugs:
        if slugs.count(slug) > 1:
            raise Problem(f"notes.md: two notes share the anchor #{slug}")
    return diffs


def parse(text):
    """Return {name of the diff: (title, story, notes)} from the text of notes.md."""
    sections = {}
    for heading, body in cut(text, "## "):
        name, _, title = heading.partition(": ")
        story, *_ = re.split(r"^### ", body, maxsplit=1, flags=re.MULTILINE)
        sections[name] = title, story.strip(), [read_part(*part) for part in cut(body, "### ")]
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


def read_part(title, body):
    """Return a note from its heading and the text below it, or an aside if it has no diff."""
    if "```diff" not in body:
        return Aside(title, body.strip())
    where = f'notes.md: the note "{title}"'
    parts = cut_at(body, NOTE, where)
    why, _, tests = parts["why"].partition("Fails without it: ")
    found = re.findall(r"`(test_[^`]+)`", tests)
    links = re.findall(r"\[([^]]+)\]\(((?:https://|\.\./)[^)]+)\)", parts["links"])
    if not links or (tests and not found):
        raise Problem(f"{where} names no {'tests' if links else 'links'}")
    return Note(title, parts["anchor"], why.strip(), found, links)


def read_lesson(diff, text):
    """Return the lines that carry the lesson, each with the note on its hunk, and the story."""
    parts = cut_at(text, LESSON, f"notes.md: {diff.name}")
    lesson = []
    for item in re.split(r"^- ", parts["list"], flags=re.MULTILINE)[1:]:
        code, _, why = item.removeprefix("`").partition("`: ")
        hunk = single([hunk for hunk in diff.hunks if hunk.adds(code)], f"`{code}`", diff)
        lesson.append(Line(code, " ".join(why.split()), hunk.note))
    if len(lesson) not in COUNTS:
        raise Problem(f"notes.md: {diff.name} lists {len(lesson)} lines; three to six are allowed")
    return lesson, parts["story"].strip()


def single(found, line, diff):
    """Return the only hunk that was found with this line."""
    if len(found) != 1:
        where = f"in {len(found)} hunks" if found else "in no hunk"
        raise Problem(f"notes.md: {line} is {where} of {diff.name}")
    return found[0]


def tie(diff, notes):
    """Attach the notes to the hunks: one to each."""
    for note in notes:
        if isinstance(note, Aside):
            diff.told.append(note)
            continue
        found = [hunk for hunk in diff.hunks if note.anchor in hunk.changed]
        hunk = single(found, f'the line of "{note.title}"', diff)
        if hunk.note:
            titles = f'"{hunk.note.title}" and "{note.title}"'
            raise Problem(f"notes.md: {titles} are on the same hunk of {diff.name}")
        hunk.note = note
        diff.told.append(hunk)
    for hunk in diff.hunks:
        if not hunk.note:
            line = hunk.changed[0]
            raise Problem(f"notes.md: no note on the hunk {hunk.header} of {diff.name}: {line}")
