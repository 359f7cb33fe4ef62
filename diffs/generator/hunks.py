"""The hunks between consecutive scripts, and the notes in diffs/README.md that explain them."""

import difflib
import re
from dataclasses import dataclass, field
from itertools import pairwise

from markdown_it import MarkdownIt

README = "diffs/README.md"  # the page with a note on each hunk
BLOCK = re.compile(r"\n```diff\n(?P<hunks>.*?)```\n", re.DOTALL)  # hunks at the beginning of a note
DETAILS = re.compile(r"<details>.*?</details>\n*", re.DOTALL)  # the list of a note's tests
# The line that is replaced by the figure:
FIGURE = re.compile("^Play with it: `.*#fig-(.+)`\n+", re.MULTILINE)
LESSON = re.compile(r"^(?P<number>\d\.) \[`(?P<code>.+?)`\]\(#.*?\): ", re.MULTILINE)


class Problem(Exception):
    """An error in a page, described in one line."""


@dataclass(eq=False)  # two hunks may have the same lines
class Hunk:
    header: str  # "@@ -34,11 +48,12 @@"
    lines: list  # lines with "-", "+" or " " in front
    note: "Note | None" = None

    @property
    def text(self):
        return "\n".join([self.header, *self.lines])

    @property
    def starts(self):
        """The number of its first line in each file, counted from 0."""
        return [int(number) - 1 for number in re.findall(r"[-+](\d+)", self.header)]

    @property
    def slug(self):
        """Its id on the page: the id of its note, with a number for all but the first hunk."""
        number = self.note.hunks.index(self)
        return f"{self.note.slug}-{number + 1}" if number else self.note.slug

    @property
    def changed(self):
        return [line for line in self.lines if line[0] in "+-"]

    @property
    def brief(self):
        """The slice of its lines that shows the changes, or an insertion and the line before it."""
        signs = "".join(line[0] for line in self.lines)
        is_insertion = set(signs.strip()) == {"+"}
        return slice(0 if is_insertion else len(signs) - len(signs.lstrip()), len(signs.rstrip()))


@dataclass(eq=False)
class Note:
    """A section of diffs/README.md below a step. One without hunks belongs to the whole step."""

    title: str
    words: str  # search terms that the note itself does not contain
    body: str  # everything below its heading in the README
    hunks: list = field(default_factory=list)

    @property
    def slug(self):
        return anchor(self.title)

    @property
    def tests(self):
        return re.findall(r"`(test_[^`]+)`", "".join(DETAILS.findall(self.body)))

    @property
    def figures(self):
        return FIGURE.findall(self.body)

    @property
    def text(self):
        """The note without its hunks and its tests."""
        return DETAILS.sub("", FIGURE.sub("", BLOCK.sub("", self.body, count=1))).strip()

    @property
    def markdown(self):
        """The whole section below its heading, with the hunks updated from the scripts."""
        hunks = "".join(f"{hunk.text}\n" for hunk in self.hunks)
        return BLOCK.sub(lambda _: f"\n```diff\n{hunks}```\n", self.body, count=bool(hunks))


class Diff:
    """The difference between two files, as `diff -u` writes it, and the notes on it."""

    def __init__(self, old, new, texts=None, context=3):
        """Compare two files; `texts` are their contents if they are not on disk."""
        self.old, self.new = old, new
        texts = texts or [path.read_text(encoding="utf-8") for path in (old, new)]
        self.old_lines, self.new_lines = map(str.splitlines, texts)
        self.hunks = []
        self.title = self.body = ""  # heading and text of its section in the README
        self.notes = []  # in the order of the README
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
    def markdown(self):
        """Its section below the heading, with up-to-date links to the notes on the hunks."""
        return self.linked(lambda hunk: hunk.note.slug)

    def linked(self, slug_of):
        """Return its section, in which each line of the lesson links to the slug of its hunk."""

        def link(line):
            slug = slug_of(self.hunk_with(line["code"]))
            return f"{line['number']} [`{line['code']}`](#{slug}): "

        return LESSON.sub(link, self.body)

    def hunk_with(self, code):
        """Return the only hunk that adds a line which starts with this code."""
        added = [[line[1:].strip() for line in hunk.lines if line[0] == "+"] for hunk in self.hunks]
        found = [any(line.startswith(code) for line in lines) for lines in added]
        if sum(found) != 1:
            raise Problem(f"README.md: `{code}` is in {sum(found)} hunks of {self.name}")
        return self.hunks[found.index(True)]


# ---------------------------------------------------------------- pages in Markdown


def anchor(title):
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def sections(text):
    """Yield the sections of a page: (level of the heading, heading, text below it)."""
    lines = text.splitlines(keepends=True)
    tokens = MarkdownIt().parse(text)
    heads = [(*each.map, int(each.tag[1])) for each in tokens if each.type == "heading_open"]
    for (start, end, level), (until, *_) in pairwise([*heads, (len(lines),)]):
        yield level, lines[start].lstrip("#").strip(), "".join(lines[end:until])


def split_words(text):
    """Return the search terms in the comment that begins a section, and the rest of its text."""
    found = re.match(r"\s*<!-- words: (.+) -->\n", text)
    return (found[1], text[found.end() :]) if found else ("", text)


# ---------------------------------------------------------------- notes


def annotated_diffs(root):
    """Return the diffs from each step to the next, with the notes of diffs/README.md."""
    diffs = [Diff(old, new) for old, new in pairwise(sorted(root.glob("0[1-9]_*.py")))]
    by_name = {diff.name: diff for diff in diffs}
    for level, heading, text in sections((root / README).read_text(encoding="utf-8")):
        words, body = split_words(text)
        name, _, title = heading.partition(": ")
        if level == 2 and name in by_name:
            diff = by_name[name]
            diff.title, diff.body = title, body
        elif level == 3:
            diff.notes.append(Note(heading, words, body))
            attach(diff.notes[-1], diff)
    for diff in diffs:
        for hunk in diff.hunks:
            if not hunk.note:
                place = f"{hunk.header} of {diff.name}: {hunk.changed[0]}"
                raise Problem(f"README.md: no note on the hunk {place}")
    return diffs


def attach(note, diff):
    """Attach a note to the hunks whose lines it shows, even if these lines are out of date."""
    shown = BLOCK.match(note.body)
    pieces = re.split("^@@ .*\n", shown["hunks"], flags=re.MULTILINE) if shown else []
    for piece in filter(None, pieces):
        lines = {line for line in piece.splitlines() if line[:1] in ("+", "-") and line[1:].strip()}
        hunk = max(diff.hunks, key=lambda hunk: len(lines.intersection(hunk.changed)))
        if not lines.intersection(hunk.changed):
            raise Problem(f'README.md: the note "{note.title}" shows no hunk of {diff.name}')
        note.hunks.append(hunk)
        hunk.note = note


def updated_readme(root, diffs):
    """Return diffs/README.md with its hunks, and the links to them, updated from the scripts."""
    text = (root / README).read_text(encoding="utf-8")
    for section in [each for diff in diffs for each in (diff, *diff.notes)]:
        text = text.replace(section.body, section.markdown)
    return text
