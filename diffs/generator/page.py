"""The page diffs/index.html: the steps, with notes beside what changes between them."""

import re
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import groupby, pairwise, takewhile
from pathlib import Path

from hunks import FIGURE, anchor, sections
from lookup import entries
from markupsafe import Markup
from patches import KINDS, RECIPES, readme
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES
from templates import ENV, FIGURES

# Pygments' short name of a kind of token, or its first letter -> HTML element that page.css colours
ELEMENTS = {"c": "i", "s": "q", "m": "u", "k": "b", "ow": "b"}
ELEMENTS |= dict.fromkeys(["nf", "fm", "nc", "nd"], "dfn")  # functions, classes and decorators
TAGS = {" ": "span", "-": "del", "+": "ins"}
ALIKE = 0.5  # similarity of two lines below which no words are marked
STEPS_WIDTH, PATCHES_WIDTH = 33, 48  # number of characters in a line of the text beside the code


# ---------------------------------------------------------------- lines of code


@cache  # most patches start from the same script
def highlight(lines):
    """Return for each line the HTML elements of its characters."""
    found = []
    for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(lines)):
        name = STANDARD_TYPES[kind]
        found += [ELEMENTS.get(name, ELEMENTS.get(name[:1], ""))] * len(text)
    rest = iter(found)
    return [[tag for _, tag in zip(f"{line}\n", rest)] for line in lines]


def paint(line, tags, marked):
    """Return a line as HTML, in which the range `marked` of its characters is marked as changed."""
    html = []
    styles = iter((tag, number in marked) for number, tag in enumerate(tags))
    for (tag, is_marked), run in groupby(line, lambda _: next(styles)):
        text = Markup(escape("".join(run), quote=False))
        shown = Markup("<{0}>{1}</{0}>").format(tag, text) if tag else text
        html.append(Markup("<mark>{}</mark>").format(shown) if is_marked else shown)
    return Markup().join(html).replace(Markup("</mark><mark>"), Markup())


def differing(old, new):
    """Return the range of characters, in whole words, in which each of two lines differs."""
    both = [re.findall(r"\w+|\W", line) for line in (old, new)]
    start = common(both)
    end = common([words[start:][::-1] for words in both])
    first = len("".join(both[0][:start]))
    return [range(first, len("".join(words[: len(words) - end]))) for words in both]


def common(both):
    """Return how many elements two lists have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both)))


def alike(old, new):
    """Yield the positions of lines that replace each other: (old, new)."""
    done = 0
    for i, line in enumerate(old):
        for j in range(done, len(new)):
            matcher = SequenceMatcher(None, line.strip(), new[j].strip(), autojunk=False)
            if matcher.ratio() > ALIKE:
                yield i, j
                done = j + 1
                break


class Code:
    """The lines of a diff's two files as HTML. If a line replaces another one, the words in which
    they differ are marked."""

    def __init__(self, diff):
        self.lines = diff.old_lines, diff.new_lines
        self.tags = [highlight(tuple(lines)) for lines in self.lines]
        self.marks = {}, {}  # {number of a line: range of its characters}
        matcher = SequenceMatcher(None, *self.lines, autojunk=False)
        for kind, i1, i2, j1, j2 in matcher.get_opcodes():
            old, new = diff.old_lines[i1:i2], diff.new_lines[j1:j2]
            for i, j in alike(old, new) if kind == "replace" else ():
                self.marks[0][i1 + i], self.marks[1][j1 + j] = differing(old[i], new[j])

    def block(self, starts, signs, shown=slice(None)):
        """Return consecutive lines of a diff as HTML.

        `starts` holds the numbers of the first old and the first new line, `signs` has "-", "+" or
        " " for each line, and `shown` selects a slice of the lines.
        """
        (old, new), html = starts, []
        for sign in signs:
            side, number = (0, old) if sign == "-" else (1, new)
            marked = self.marks[side].get(number, ())
            line = paint(self.lines[side][number], self.tags[side][number], marked)
            html.append(Markup("<{0}>{1}</{0}>\n").format(TAGS[sign], line))
            old, new = old + (sign != "+"), new + (sign != "-")
        block = '<div class="code" style="counter-reset:line {}">\n{}</div>'
        return Markup(block).format(starts[1], Markup().join(html[shown]))

    def hunk(self, hunk, shown=slice(None)):
        return self.block(hunk.starts, [line[0] for line in hunk.lines], shown)


def fits_beside(text, hunks, width):
    """Return whether a text fits beside these hunks without leaving an empty area below them."""
    lines = sum(1 + len(paragraph) / width for paragraph in text.split("\n\n"))
    return 1.2 * lines < 6 + sum(len(hunk.lines) for hunk in hunks)  # code has a smaller font


def parts(diff):
    """Yield the two files in parts, from top to bottom: folded lines, and hunks with notes."""
    code, end = Code(diff), 0
    for number, hunk in enumerate(diff.hunks, 1):
        note, start = hunk.note, hunk.starts[1]
        yield from fold(diff, code, end, start)
        is_first = note.hunks[0] is hunk  # its note is shown here
        fits = is_first and fits_beside(note.text, [hunk], STEPS_WIDTH)
        part = {"note": note, "slug": hunk.slug, "number": number, "html": code.hunk(hunk)}
        yield {**part, "first": is_first, "beside": fits}
        following = diff.notes[diff.notes.index(note) + 1 :] if is_first else []
        for note in takewhile(lambda note: not note.hunks, following):
            yield {"note": note, "slug": note.slug, "first": True, "beside": False}
        end = start + sum(line[0] != "-" for line in hunk.lines)
    yield from fold(diff, code, end, len(diff.new_lines))


def fold(diff, code, start, end):
    """If there are lines from `start` to `end`, yield a part of the page that folds them."""
    if start < end:
        text = "\n".join(diff.new_lines[start:end])
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        html = code.block((start, start), " " * (end - start))
        yield {"names": names, "count": end - start, "html": html}


# ---------------------------------------------------------------- the page


def front(root, diff):
    """Return the section of the front page that shows which lines a script needs."""
    text = (root / "README.md").read_text(encoding="utf-8")
    title, body = next((title, body) for _, title, body in sections(text) if "```diff\n" in body)
    before, after = re.split(r"```diff\n.*?^```\n", body, flags=re.DOTALL | re.MULTILINE)
    code = Code(diff)
    lines = [code.hunk(hunk, hunk.brief) for hunk in diff.hunks]
    return {"slug": "start", "title": title, "before": before, "lines": lines, "after": after}


def step(diff):
    """Return what the template shows for one step."""
    intro = FIGURE.sub("", diff.linked(lambda hunk: hunk.slug))
    shown = {"slug": diff.slug, "title": f"{diff.name}: {diff.title}", "diff": diff}
    return {**shown, "intro": intro, "figures": FIGURE.findall(diff.body), "parts": parts(diff)}


def tab(root, pages, kind):
    """Return what the template shows for the recipes, or for the pitfalls."""
    title, _, story, *_ = readme(root, kind).removeprefix("# ").split("\n\n")
    shown = []
    for page in (page for page in pages if page.kind == kind):
        code = Code(page.diff)
        html = [code.hunk(hunk) for hunk in page.diff.hunks]
        fits = fits_beside(page.text_without_patch, page.diff.hunks, PATCHES_WIDTH)
        shown.append({"patch": page, "hunks": html, "beside": fits})
    names = {"slug": Path(kind).name, "place": f"{kind}/README.md", "title": title}
    figures = ["which-one"] if kind == RECIPES else []
    return {**names, "story": story, "figures": figures, "patches": shown}


def figures(kind):
    """Yield the name and the text of each of the figures' styles, scripts or data."""
    for path in sorted(FIGURES.glob(f"*.{kind}")):
        yield path.stem, Markup(path.read_text(encoding="utf-8").replace("</", r"<\/"))


def render(root, front_diff, diffs, pages):
    """Return the page as HTML. A link to a section that is on this page leads to that section."""
    ids = {page.path: page.slug for page in pages}  # {path, with #anchor: id on this page}
    for diff in diffs:
        ids[f"diffs/README.md#{anchor(f'{diff.name}: {diff.title}')}"] = diff.slug
        for shown in (*diff.notes, *diff.hunks):
            ids[f"diffs/README.md#{shown.slug}"] = f"{diff.slug}-{shown.slug}"
    lookup = {"slug": "troubleshooting", "title": "Troubleshooting: look up what you see"}
    lookup["entries"] = entries(root, ids)
    steps, tabs = list(map(step, diffs)), [tab(root, pages, kind) for kind in KINDS]
    start = front(root, front_diff)
    for section, following in pairwise([start, *steps, *tabs, lookup]):
        section["next"] = following
    shown = {"start": start, "steps": steps, "tabs": tabs, "lookup": lookup, "figures": figures}
    html = ENV.get_template("page.html.j2").render(shown)
    html = html.replace('href="../diffs/index.html#', 'href="#')
    away = r'(?<=href=")\.\./([^"]+)'
    return re.sub(away, lambda link: f"#{ids[link[1]]}" if link[1] in ids else link[0], html)
