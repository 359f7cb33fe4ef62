"""The page diffs/index.html: old step left, new step right, notes beside the hunks."""

import re
from difflib import SequenceMatcher
from itertools import accumulate, groupby, pairwise, zip_longest
from pathlib import Path

from hunks import compare, ladder
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from patches import KINDS, symptoms
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

HERE = Path(__file__).resolve().parent
STYLES = {  # the CSS class for each of Pygments' token types that the page colours
    Comment: "c",
    String: "s",
    Number: "n",
    Keyword: "k",
    Operator.Word: "k",
    Name.Function: "f",
    Name.Class: "f",
    Name.Decorator: "f",
}
LINK = re.compile(r"\]\((?:\.\./\w+/)?(\w+)\.md\)")  # from one recipe or pitfall to another
SLUGS = {
    name: f"{kind[:-1]}-{name.replace('_', '-')}"
    for kind in KINDS
    for names in KINDS[kind].groups.values()
    for name in names
}
ALIKE = 0.5  # lines less similar than this are not placed side by side


# ---------------------------------------------------------------- one line


def style(kind):
    """Return the CSS class for a token type or its nearest parent."""
    while kind and kind not in STYLES:
        kind = kind.parent
    return STYLES.get(kind, "")


def highlight(lines):
    """Return the coloured pieces of each line: [[(CSS class, text)]]."""
    result = [[]]
    for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(lines)):
        for number, piece in enumerate(text.split("\n")):
            if number:
                result.append([])
            if piece:
                result[-1].append((style(kind), piece))
    return result[: len(lines)]


def paint(pieces, marks=()):
    """Return a line as HTML, with these ranges of characters marked as changed."""
    html, start = [], 0
    for css, text in pieces:
        for part, marked in split(text, start, marks):
            shown = Markup('<span class="{}">{}</span>').format(css, part) if css else wrap(part)
            html.append(Markup("<mark>{}</mark>").format(shown) if marked else shown)
        start += len(text)
    return Markup().join(html).replace(Markup("</mark><mark>"), Markup())


def wrap(text):
    """Return code as HTML that can be wrapped after a dot or a bracket."""
    return Markup(re.sub(r"(?<=[.(])(?=\w|$)", "<wbr>", str(escape(text))))


def split(text, start, marks):
    """Cut a piece, which starts at this character of its line, at the edges of the marks."""
    ends = {edge - start for mark in marks for edge in mark if 0 < edge - start < len(text)}
    edges = [0, *sorted(ends), len(text)]
    for a, b in pairwise(edges):
        yield text[a:b], any(i <= start + a and start + b <= j for i, j in marks)


def changed_words(old, new):
    """Return the ranges of characters that differ: (in the old line, in the new line)."""
    old_words, new_words = (re.findall(r"\w+|\s+|[^\w\s]", line) for line in (old, new))
    changes = [
        (i1, i2, j1, j2)
        for tag, i1, i2, j1, j2 in SequenceMatcher(
            None, old_words, new_words, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    ]
    return (
        ranges(old_words, [(i1, i2) for i1, i2, _, _ in changes]),
        ranges(new_words, [(j1, j2) for _, _, j1, j2 in changes]),
    )


def ranges(words, stretches):
    """Return the ranges of characters of these stretches of words, but for blank ones."""
    ends = [0, *accumulate(map(len, words))]
    return [(ends[a], ends[b]) for a, b in stretches if "".join(words[a:b]).strip()]


# ---------------------------------------------------------------- rows of two lines


def likeness(old, new):
    """Return how similar two lines are, from ALIKE to 1, or 0 if they are less."""
    matcher = SequenceMatcher(None, old.strip(), new.strip(), autojunk=False)
    if matcher.quick_ratio() <= ALIKE:  # an upper bound, and much faster
        return 0
    ratio = matcher.ratio()
    return ratio if ratio > ALIKE else 0


def align(old, new):
    """Return the positions of the similar lines to place side by side: [(old, new)]."""
    best = {}  # {(start in old, in new): (total likeness from there on, first pair)}
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
    """Yield (old position, new position, alike); None where a side has no line."""
    i, j = 0, 0
    for a, b in [*align(old, new), (len(old), len(new))]:
        yield from ((*pair, False) for pair in zip_longest(range(i, a), range(j, b)))
        if a < len(old):
            yield a, b, True
        i, j = a + 1, b + 1


class Sides:
    """The two files of a diff as rows for the template."""

    def __init__(self, diff):
        self.lines = diff.old_lines, diff.new_lines
        self.pieces = [highlight(lines) for lines in self.lines]

    def same(self, old, new, count):
        """Return the rows of unchanged lines."""
        return [self.row(old + n, new + n) for n in range(count)]

    def change(self, old, old_count, new, new_count):
        """Return the rows of replaced lines."""
        stretch = self.lines[0][old : old + old_count], self.lines[1][new : new + new_count]
        return [
            self.row(None if i is None else old + i, None if j is None else new + j, True, alike)
            for i, j, alike in side_by_side(*stretch)
        ]

    def row(self, old, new, changed=False, alike=False):
        """Return a row; the number is None where a side has no line."""
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
    """Yield the rows of a hunk, grouped into unchanged and changed stretches."""
    old, new = hunk.old_start, hunk.new_start
    for kept, run in groupby(hunk.lines, key=lambda line: line[0] == " "):
        signs = [line[0] for line in run]
        if kept:
            old_count = new_count = len(signs)
            yield sides.same(old, new, old_count)
        else:
            old_count, new_count = signs.count("-"), signs.count("+")
            yield sides.change(old, old_count, new, new_count)
        old, new = old + old_count, new + new_count


def parts(diff, slugs):
    """Return the whole of both files in parts: folded lines and hunks."""
    sides, old, new = Sides(diff), 0, 0
    for number, hunk in enumerate(diff.hunks):
        yield from fold(sides, old, new, hunk.old_start - old)
        stretch = list(stretches(hunk, sides))
        yield {"hunk": hunk, "id": slugs[number], "number": number + 1, "stretches": stretch}
        old, new = hunk.old_start + hunk.old_count, hunk.new_start + hunk.new_count
    yield from fold(sides, old, new, len(diff.old_lines) - old)


def fold(sides, old, new, count):
    """Yield a part that hides these lines until they are unfolded, if there are any."""
    if count:
        text = "\n".join(sides.lines[0][old : old + count])
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        yield {"hunk": None, "names": names, "count": count, "rows": sides.same(old, new, count)}


# ---------------------------------------------------------------- the page


def markdown(root):
    """Return a function that turns Markdown into HTML, with its pictures inlined."""
    parser = MarkdownIt("commonmark", {"html": False})

    def picture(_, tokens, index, *__):
        svg = (root / "diffs" / tokens[index].attrs["src"]).read_text(encoding="utf-8")
        return Markup('<span class="picture">{}</span>').format(Markup(svg[svg.index("<svg") :]))

    def to_html(text):
        return Markup(parser.render(LINK.sub(lambda link: f"](#{SLUGS[link[1]]})", text)))

    parser.add_render_rule("image", picture)
    return to_html


def view(diff):
    """Return what the template shows for one step."""
    ids = [f"{diff.slug}-{hunk.note.slug}" for hunk in diff.hunks]
    story, mark, picture = diff.story.partition("\n\n![")
    shown = {"diff": diff, "slug": diff.slug, "story": story, "picture": (mark + picture).strip()}
    return {**shown, "parts": list(parts(diff, ids))}


def directly(root, diffs):
    """Return what the template shows for the first step against the last."""
    first, *_, last = ladder(root)
    diff = compare(first, last)
    diff.title = "all steps in one diff"
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


def tab(kind, collected):
    """Return what the template shows for the patches of one kind."""
    shown = []
    for patch in collected:
        sides = Sides(patch.diff)
        shown.append({"patch": patch, "hunks": [stretches(h, sides) for h in patch.diff.hunks]})
    return {"slug": kind, "title": KINDS[kind].title, "story": KINDS[kind].story, "patches": shown}


def render(root, diffs, collections):
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
    env.filters["inline"] = lambda text: Markup(MarkdownIt("commonmark").renderInline(text))
    template = env.get_template("page.html.j2")
    steps = [*map(view, diffs), directly(root, diffs)]
    tabs = [tab(*item) for item in collections.items()]
    return template.render(steps=steps, tabs=tabs, symptoms=symptoms(collections))
