"""The page diffs/index.html: old step left, new step right, notes beside the hunks."""

import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import accumulate, groupby, islice, pairwise, zip_longest
from pathlib import Path

from holds import pictures
from hunks import compare, ladder
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from patches import KINDS
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from lookup import entries

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "figures"  # per figure: its HTML, its script and its data, if it has any
PLACES = {  # the step, tab or hunk at which figures stand
    "01-to-02": ["one-step"],
    "01-to-02-give-each-rank-its-share-of-the-data": ["who-gets-which"],
    "03-to-04": ["life-of-a-job"],
    "04-to-05": ["who-is-counted"],
    "recipes": ["which-one", "where-the-time-goes"],
}
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


def names_of(kind):
    return [name for names in KINDS[kind].groups.values() for name in names]


SLUGS = {name: f"{kind[:-1]}-{name.replace('_', '-')}" for kind in KINDS for name in names_of(kind)}
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
        title = hunk.note.title if hunk.note else ""
        shown = {"hunk": hunk, "id": slugs[number], "number": number + 1, "title": title}
        yield {**shown, "stretches": list(stretches(hunk, sides))}
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
    drawn = {path.name: text for path, text in pictures(root).items()}  # perhaps not written yet

    def picture(_, tokens, index, *__):
        path = root / "diffs" / tokens[index].attrs["src"]
        svg = drawn.get(path.name) or path.read_text(encoding="utf-8")
        return Markup('<span class="picture">{}</span>').format(Markup(svg[svg.index("<svg") :]))

    def here(link):  # pages that are no patches stay files
        return f"](#{SLUGS[link[1]]})" if link[1] in SLUGS else link[0]

    def to_html(text):
        return Markup(parser.render(LINK.sub(here, text)))

    parser.add_render_rule("image", picture)
    return to_html


def view(diff):
    """Return what the template shows for one step."""
    ids = [f"{diff.slug}-{hunk.note.slug}" for hunk in diff.hunks]
    story, mark, picture = diff.story.partition("\n\n![")
    shown = {"diff": diff, "story": story, "picture": (mark + picture).strip()}
    return {**shown, **heading(diff), "parts": list(parts(diff, ids))}


def heading(diff):
    return {"slug": diff.slug, "title": f"{diff.name}: {diff.title}"}


def directly(root, diffs):
    """Return what the template shows for the first step against the last."""
    first, *_, last = ladder(root)
    diff = compare(first, last)
    diff.title = "all steps in one diff"
    shown = {"diff": diff, "story": "", "picture": "", **heading(diff)}
    shown["parts"] = list(parts(diff, [f"{diff.slug}-{n + 1}" for n in range(len(diff.hunks))]))
    traced = trace(diffs)
    for part in shown["parts"]:
        if part["hunk"]:
            part.update(united(diffs, Counter(sources(part["hunk"], *traced))))
    return shown


def trace(diffs):
    """Follow each line from the first script to the last.

    Return what each line of the last comes from, the hunk that added it or its number in the first,
    and the hunks that removed lines of the first: ([hunk or number], {number: hunk}).
    """
    lines, removed = list(range(len(diffs[0].old_lines))), {}
    for diff in diffs:
        before, lines = iter(lines), []
        for hunk in diff.hunks:
            lines += islice(before, hunk.new_start - len(lines))
            for line in hunk.lines:
                if line[0] == "-":
                    removed[next(before)] = hunk
                else:
                    lines.append(hunk if line[0] == "+" else next(before))
        lines += before
    return lines, removed


def sources(hunk, added, removed):
    """Yield what each changed line of a hunk between the first script and the last comes from."""
    old, new = hunk.old_start, hunk.new_start
    for line in hunk.lines:
        if line[0] == "+":
            yield added[new]
        elif line[0] == "-":
            yield removed.get(old)
        old, new = old + (line[0] != "+"), new + (line[0] != "-")


def united(diffs, counts):
    """Return the hunks that a hunk unites, and its title: those of the two with most lines."""
    found = [(diff, hunk) for diff in diffs for hunk in diff.hunks if counts[hunk]]
    least = min(sorted(counts[hunk] for _, hunk in found)[-2:])
    titles = [hunk.note.title for _, hunk in found if counts[hunk] >= least]
    origins = [
        {"id": f"{diff.slug}-{hunk.note.slug}", "step": diff.name, "title": hunk.note.title}
        for diff, hunk in found
    ]
    return {"title": " · ".join(titles), "origins": origins}


def tab(kind, collected):
    """Return what the template shows for the patches of one kind."""
    shown = []
    for patch in collected:
        sides = Sides(patch.diff)
        shown.append({"patch": patch, "hunks": [stretches(h, sides) for h in patch.diff.hunks]})
    return {"slug": kind, "title": KINDS[kind].title, "story": KINDS[kind].story, "patches": shown}


def figures(kind):
    """Return the figures' scripts or data: [(name, text)]."""
    for path in sorted(FIGURES.glob(f"*.{kind}")):
        yield path.stem, Markup(path.read_text(encoding="utf-8").replace("</", r"<\/"))


def anchors(diffs):
    """Return the ids on the page of what the pages of messages link to: {link: id}."""
    ids = {f"{kind}/{name}.md": SLUGS[name] for kind in KINDS for name in names_of(kind)}
    for diff in diffs:
        ids |= {f"diffs/README.md#{h.note.slug}": f"{diff.slug}-{h.note.slug}" for h in diff.hunks}
    return ids


def render(root, diffs, collections, messages, asked):
    """Return the page as HTML."""
    env = Environment(
        loader=FileSystemLoader([HERE, FIGURES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters["markdown"] = markdown(root)
    env.filters["inline"] = lambda text: Markup(MarkdownIt("commonmark").renderInline(text))
    env.globals["figures"] = figures
    env.globals["places"] = PLACES
    template = env.get_template("page.html.j2")
    steps = [*map(view, diffs), directly(root, diffs)]
    tabs = [tab(*item) for item in collections.items()]
    lookup = {"slug": "troubleshooting", "title": "Troubleshooting: look up what you see"}
    lookup |= {"entries": entries(messages, collections, anchors(diffs)), "asked": asked}
    for one, following in pairwise([*steps, *tabs, lookup]):
        one["next"] = following
    return template.render(steps=steps, tabs=tabs, lookup=lookup)
