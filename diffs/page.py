"""The page diffs/index.html: old step left, new step right, the notes beside their hunks."""

import re
from difflib import SequenceMatcher
from itertools import pairwise, zip_longest
from pathlib import Path

from hunks import compare, ladder
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

HERE = Path(__file__).resolve().parent
STYLES = {  # Pygments' kinds of tokens that the page tells apart, by CSS class
    Comment: "c",
    String: "s",
    Number: "n",
    Keyword: "k",
    Operator.Word: "k",
    Name.Function: "f",
    Name.Class: "f",
    Name.Decorator: "f",
}
ALIKE = 0.5  # lines that share less than this are not set side by side


# ---------------------------------------------------------------- one line


def style(kind):
    """Return the CSS class of a token, from its kind or the nearest kind above."""
    while kind and kind not in STYLES:
        kind = kind.parent
    return STYLES.get(kind, "")


def highlight(lines):
    """Return for each line its pieces, as (CSS class, text)."""
    result = [[]]
    for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(lines)):
        for number, piece in enumerate(text.split("\n")):
            if number:
                result.append([])
            if piece:
                result[-1].append((style(kind), piece))
    return result[: len(lines)]


def paint(pieces, marks=()):
    """Return a line as HTML; marks are the ranges of characters that differ."""
    html, start = [], 0
    for css, text in pieces:
        for part, marked in split(text, start, marks):
            shown = Markup('<span class="{}">{}</span>').format(css, part) if css else wrap(part)
            html.append(Markup("<mark>{}</mark>").format(shown) if marked else shown)
        start += len(text)
    return Markup().join(html).replace(Markup("</mark><mark>"), Markup())


def wrap(text):
    """Return code as HTML that a narrow screen may break after a dot or a bracket."""
    return Markup(re.sub(r"(?<=[.(])(?=\w|$)", "<wbr>", str(escape(text))))


def split(text, start, marks):
    """Cut a piece that begins at this character where marks begin and end."""
    ends = {edge - start for mark in marks for edge in mark if 0 < edge - start < len(text)}
    edges = [0, *sorted(ends), len(text)]
    for a, b in pairwise(edges):
        yield text[a:b], any(i <= start + a and start + b <= j for i, j in marks)


def changed_words(old, new):
    """Return the ranges of characters that differ, in the old line and in the new one."""
    words = [re.findall(r"\w+|\s+|[^\w\s]", line) for line in (old, new)]
    ends = [[0], [0]]
    for side, end in zip(words, ends, strict=True):
        for word in side:
            end.append(end[-1] + len(word))
    marks = [], []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        if tag != "equal":
            for mark, end, a, b in ((marks[0], ends[0], i1, i2), (marks[1], ends[1], j1, j2)):
                if a < b and "".join(words[mark is marks[1]][a:b]).strip():
                    mark.append((end[a], end[b]))
    return marks


# ---------------------------------------------------------------- rows of two lines


def likeness(old, new):
    """Return how alike two lines are, from 0 to 1; too little counts as nothing."""
    matcher = SequenceMatcher(None, old.strip(), new.strip(), autojunk=False)
    ratio = matcher.quick_ratio() > ALIKE and matcher.ratio()
    return ratio if ratio > ALIKE else 0


def align(old, new):
    """Return pairs of positions in which lines that are alike meet, in order."""
    best = {}  # (lines left of old, of new): (likeness of all pairs, first pair)
    for i in range(len(old), -1, -1):
        for j in range(len(new), -1, -1):
            choices = []
            if i < len(old) and j < len(new) and (alike := likeness(old[i], new[j])):
                choices.append((alike + best[i + 1, j + 1][0], (i, j)))
            if i < len(old):
                choices.append((best[i + 1, j][0], (i, None)))
            if j < len(new):
                choices.append((best[i, j + 1][0], (None, j)))
            best[i, j] = max(choices, key=lambda choice: choice[0], default=(0, None))
    pairs, i, j = [], 0, 0
    while pair := best[i, j][1]:
        if None not in pair:
            pairs.append(pair)
        i, j = i + (pair[0] is not None), j + (pair[1] is not None)
    return pairs


def side_by_side(old, new):
    """Yield (old position, new position, alike); None stands for no line on that side."""
    i, j = 0, 0
    for a, b in [*align(old, new), (len(old), len(new))]:
        yield from ((*pair, False) for pair in zip_longest(range(i, a), range(j, b)))
        if a < len(old):
            yield a, b, True
        i, j = a + 1, b + 1


class Sides:
    """The two files of a diff, ready to be shown line by line."""

    def __init__(self, diff):
        self.lines = diff.old_lines, diff.new_lines
        self.pieces = [highlight(lines) for lines in self.lines]

    def same(self, old, new, count):
        """Return the rows of a stretch that both have."""
        return [self.row(old + n, new + n) for n in range(count)]

    def change(self, old, old_count, new, new_count):
        """Return the rows of a stretch that was replaced."""
        stretch = self.lines[0][old : old + old_count], self.lines[1][new : new + new_count]
        return [
            self.row(None if i is None else old + i, None if j is None else new + j, True, alike)
            for i, j, alike in side_by_side(*stretch)
        ]

    def row(self, old, new, changed=False, alike=False):
        """Return what the template shows of two lines; None stands for no line on that side."""
        marks = changed_words(self.lines[0][old], self.lines[1][new]) if alike else ((), ())
        cells = [
            None if number is None else self.cell(side, number, marks[side])
            for side, number in enumerate((old, new))
        ]
        return {"kind": "change" if changed else "same", "old": cells[0], "new": cells[1]}

    def cell(self, side, number, marks):
        line = self.lines[side][number]
        indent = len(line) - len(line.lstrip())
        html = paint(self.pieces[side][number], marks)
        return {"number": number + 1, "indent": indent, "html": html}


def stretches(hunk, sides):
    """Return the rows of a hunk, in stretches that are all kept or all changed."""
    old, new = hunk.old_start, hunk.new_start
    for kept, lines in runs(hunk.lines):
        removed, added = (sum(line[0] != sign for line in lines) for sign in "+-")
        yield sides.same(old, new, removed) if kept else sides.change(old, removed, new, added)
        old, new = old + removed, new + added


def runs(lines):
    """Cut the lines of a hunk where kept and changed ones meet."""
    found = []
    for line in lines:
        kept = line[0] == " "
        if not found or found[-1][0] != kept:
            found.append((kept, []))
        found[-1][1].append(line)
    return found


def parts(diff, slugs):
    """Return a whole file in parts: what is folded away, and the hunks."""
    sides, old, new = Sides(diff), 0, 0
    for number, hunk in enumerate(diff.hunks):
        yield from fold(sides, old, new, hunk.old_start - old)
        stretch = list(stretches(hunk, sides))
        yield {"hunk": hunk, "id": slugs[number], "number": number + 1, "stretches": stretch}
        old = hunk.old_start + sum(line[0] != "+" for line in hunk.lines)
        new = hunk.new_start + sum(line[0] != "-" for line in hunk.lines)
    yield from fold(sides, old, new, len(diff.old_lines) - old)


def fold(sides, old, new, count):
    """Return the part that folds these lines away, if there are any."""
    if count:
        text = "\n".join(sides.lines[0][old : old + count])
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        yield {"hunk": None, "names": names, "count": count, "rows": sides.same(old, new, count)}


# ---------------------------------------------------------------- the page


def markdown(root):
    """Return a function that makes HTML of the notes' Markdown, with pictures inside."""
    parser = MarkdownIt("commonmark", {"html": False})

    def picture(_, tokens, index, *__):  # with its style and its text inside
        svg = (root / "diffs" / tokens[index].attrs["src"]).read_text(encoding="utf-8")
        return Markup('<span class="picture">{}</span>').format(Markup(svg[svg.index("<svg") :]))

    parser.add_render_rule("image", picture)
    return lambda text: Markup(parser.render(text))


def view(diff):
    """Return what the template shows of one step."""
    ids = [f"{diff.slug}-{hunk.note.slug}" for hunk in diff.hunks]
    story, mark, picture = diff.story.partition("\n\n![")
    shown = {"diff": diff, "slug": diff.slug, "story": story, "picture": (mark + picture).strip()}
    return {**shown, "parts": list(parts(diff, ids))}


def directly(root, diffs):
    """Return what the template shows from the first step to the last, and where it is explained."""
    first, *_, last = ladder(root)
    diff = compare(first, last)
    diff.title = "the whole way in one diff"
    shown = {"diff": diff, "slug": diff.slug, "story": "", "picture": ""}
    shown["parts"] = list(parts(diff, [f"{diff.slug}-{n + 1}" for n in range(len(diff.hunks))]))
    for part in shown["parts"]:
        if part["hunk"]:
            lines = {line for line in part["hunk"].changed if len(line) > 8}
            part["origins"] = [
                {"id": f"{step.slug}-{hunk.note.slug}", "step": step.name, "title": hunk.note.title}
                for step in diffs
                for hunk in step.hunks
                if lines & set(hunk.changed)
            ]
    return shown


def page(root, diffs):
    """Return the page as HTML."""
    env = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters["markdown"] = markdown(root)
    template = env.get_template("page.html.j2")
    return template.render(steps=[*map(view, diffs), directly(root, diffs)])
