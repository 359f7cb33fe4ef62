"""The page diffs/index.html: both steps with what changes between them, notes beside the hunks."""

import re
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import groupby, pairwise, takewhile

from hunks import Diff, anchor, brief
from markupsafe import Markup
from patches import KINDS, readme
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from templates import ENV, FIGURES

from lookup import aliases, entries

STYLES = {  # the element for each of Pygments' token types that the page colours
    Comment: "i",
    String: "q",
    Number: "u",
    Keyword: "b",
    Operator.Word: "b",
    Name.Function: "dfn",
    Name.Class: "dfn",
    Name.Decorator: "dfn",
}
TAGS = {" ": "span", "-": "del", "+": "ins"}
ALIKE = 0.5  # of lines less similar than this, no words are marked
STEPS_WIDTH, PATCHES_WIDTH = 33, 48  # characters that a line has in a column beside the code


# ---------------------------------------------------------------- lines of code


@cache  # most patches start from the same script
def highlight(lines):
    """Return the element of each character of each line."""
    found = []
    for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(lines)):
        tag = next((STYLES[each] for each in reversed(kind.split()) if each in STYLES), "")
        found += [tag] * len(text)
    rest = iter(found)
    return [[tag for _, tag in zip(f"{line}\n", rest)] for line in lines]


def paint(line, styles, marked):
    """Return a line as HTML, with this range of characters marked as changed."""
    html = []
    kinds = iter((tag, number in marked) for number, tag in enumerate(styles))
    for (tag, inside), run in groupby(line, lambda _: next(kinds)):
        text = Markup(escape("".join(run), quote=False))
        shown = Markup("<{0}>{1}</{0}>").format(tag, text) if tag else text
        html.append(Markup("<mark>{}</mark>").format(shown) if inside else shown)
    return Markup().join(html).replace(Markup("</mark><mark>"), Markup())


def differing(old, new):
    """Return the ranges of characters between what two lines begin and end with."""
    start = alike_from_the_start(old, new)
    end = alike_from_the_start(old[start:][::-1], new[start:][::-1])
    return range(start, len(old) - end), range(start, len(new) - end)


def alike_from_the_start(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


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
    """The lines of both files of a diff as HTML; in those that replace each other, what differs is
    marked."""

    def __init__(self, diff):
        self.lines = diff.old_lines, diff.new_lines
        self.styles = [highlight(tuple(lines)) for lines in self.lines]
        self.marks = {}, {}  # {number of the line: range of its characters}
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, *self.lines).get_opcodes():
            old, new = diff.old_lines[i1:i2], diff.new_lines[j1:j2]
            for i, j in alike(old, new) if tag == "replace" else ():
                self.marks[0][i1 + i], self.marks[1][j1 + j] = differing(old[i], new[j])

    def line(self, tag, number):
        """Return a line of the old file, if the tag is "del", or of the new one."""
        side = tag != "del"
        line, styles = self.lines[side][number], self.styles[side][number]
        html = paint(line, styles, self.marks[side].get(number, ()))
        return Markup("<{0}>{1}</{0}>\n").format(tag, html)

    def hunk(self, hunk):
        (old, new), html = hunk.starts, []
        for sign, *_ in hunk.lines:
            html.append(self.line(TAGS[sign], old if sign == "-" else new))
            old, new = old + (sign != "+"), new + (sign != "-")
        return numbered(html, hunk.starts[1])

    def short(self):
        """Return the changed lines alone, each with a line that shows its place."""
        html = [self.line(TAGS[sign], number) for sign, number in brief(*self.lines)]
        return numbered(html, 0)

    def whole(self):
        """Return all lines of the new file, and between them those of the old one that go."""
        html = []
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, *self.lines, autojunk=False).get_opcodes():
            kept = tag == "equal"
            html += [self.line("del", number) for number in range(i1, i2) if not kept]
            html += [self.line("span" if kept else "ins", number) for number in range(j1, j2)]
        return numbered(html, 0)

    def fold(self, start, end):
        return numbered((self.line("span", number) for number in range(start, end)), start)


def numbered(lines, start):
    """Return lines of code whose numbers count on from here."""
    html = '<div class="code" style="counter-reset:line {}">\n{}</div>'
    return Markup(html).format(start, Markup().join(lines))


def beside(text, hunks, width):
    """Return whether a text fits beside these hunks; if not, it would leave an empty area."""
    lines = sum(1 + len(paragraph) / width for paragraph in text.split("\n\n"))
    return 1.2 * lines < 6 + sum(len(hunk.lines) for hunk in hunks)  # code has smaller letters


def parts(diff):
    """Yield both files in parts, in the order of the file: folded lines, and hunks with notes."""
    code, done = Code(diff), 0
    for number, hunk in enumerate(diff.hunks, 1):
        start = hunk.starts[1]
        yield from fold(diff, code, done, start)
        more = hunk.note.hunks.index(hunk) > 0  # its note stands at the first of them
        part = {"note": hunk.note, "hunk": hunk, "number": number, "html": code.hunk(hunk)}
        yield {**part, "more": more, "beside": beside(hunk.note.why, [hunk], STEPS_WIDTH)}
        behind = diff.notes[diff.notes.index(hunk.note) + 1 :]
        asides = takewhile(lambda note: not note.hunks, [] if more else behind)
        yield from ({"note": note, "html": "", "more": False, "beside": False} for note in asides)
        done = start + sum(line[0] != "-" for line in hunk.lines)
    yield from fold(diff, code, done, len(diff.new_lines))


def fold(diff, code, start, end):
    """Yield a part that hides these lines until they are unfolded, if there are any."""
    if start < end:
        text = "\n".join(diff.new_lines[start:end])
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        yield {"names": names, "count": end - start, "html": code.fold(start, end)}


# ---------------------------------------------------------------- the page


def view(diff):
    """Return what the template shows for one step."""
    opening, _, story = diff.story.partition("\n\n")
    story, mark, picture = story.partition("\n\n![")
    shown = {"slug": diff.slug, "title": f"{diff.name}: {diff.title}", "diff": diff}
    shown |= {"opening": opening, "story": story, "picture": (mark + picture).strip()}
    return {**shown, "parts": list(parts(diff))}


def tab(root, pages, kind):
    """Return what the template shows for the patches of one kind."""
    title, _, story, *_ = readme(root, kind).removeprefix("# ").split("\n\n")
    shown = []
    for page in (page for page in pages if page.kind == kind):
        code = Code(page.diff)
        html = [code.hunk(hunk) for hunk in page.diff.hunks]
        text = "\n\n".join([page.purpose, page.why, page.advice, page.command, *page.below])
        fits = beside(text, page.diff.hunks, PATCHES_WIDTH)
        shown.append({"patch": page, "hunks": html, "beside": fits})
    return {"slug": kind, "title": title, "story": story, "patches": shown}


def figures(kind):
    """Return the figures' scripts or data: [(name, text)]."""
    for path in sorted(FIGURES.glob(f"*.{kind}")):
        yield path.stem, Markup(path.read_text(encoding="utf-8").replace("</", r"<\/"))


def render(root, diffs, pages, messages):
    """Return the page as HTML, in which links to what it shows lead there."""
    ids = {page.path: page.slug for page in pages}  # {address: id}
    for diff in diffs:
        notes = {anchor(f"{diff.name}: {diff.title}"): diff.slug}
        notes |= {note.slug: f"{diff.slug}-{note.slug}" for note in diff.notes}
        ids |= {f"diffs/README.md#{slug}": name for slug, name in notes.items()}
    lookup = {"slug": "troubleshooting", "title": "Troubleshooting: look up what you see"}
    lookup["entries"] = entries(root, messages, pages, ids)
    lookup["aliases"] = aliases(root, ids)
    steps = list(map(view, diffs))
    tabs = [tab(root, pages, kind) for kind in KINDS]
    for one, following in pairwise([*steps, *tabs, lookup]):
        one["next"] = following
    pair = Code(Diff(root / "convert" / "train.py", root / "convert" / "train_ddp.py"))
    shown = {"pair": pair, "steps": steps, "tabs": tabs, "lookup": lookup, "figures": figures}
    html = ENV.get_template("page.html.j2").render(shown)
    html = html.replace('href="../diffs/index.html#', 'href="#')
    away = r'(?<=href=")\.\./([^"]+)'
    return re.sub(away, lambda link: f"#{ids[link[1]]}" if link[1] in ids else link[0], html)
