"""The page diffs/index.html: the steps, with notes beside what changes between them."""

import re
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import groupby, pairwise, takewhile
from pathlib import Path

from hunks import FIGURE, Diff, anchor, brief, sections
from markupsafe import Markup
from patches import KINDS, readme
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from rooms import CONVERT
from templates import ENV, FIGURES

from lookup import entries

STYLES = {  # Pygments' token type -> HTML element by which the page colours it
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
ALIKE = 0.5  # similarity of two lines below which no words are marked
STEPS_WIDTH, PATCHES_WIDTH = 33, 48  # characters in a line of the text beside the code


# ---------------------------------------------------------------- lines of code


@cache  # most patches start from the same script
def highlight(lines):
    """Return for each line the HTML elements of its characters."""
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
        self.styles = [highlight(tuple(lines)) for lines in self.lines]
        self.marks = {}, {}  # {number of a line: range of its characters}
        matcher = SequenceMatcher(None, *self.lines, autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
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

    def brief(self):
        """Return only the changed lines, with unchanged lines that show where they are."""
        html = [self.line(TAGS[sign], number) for sign, number in brief(*self.lines)]
        return numbered(html, 0)

    def fold(self, start, end):
        return numbered((self.line("span", number) for number in range(start, end)), start)


def numbered(lines, start):
    """Return lines of code, numbered from `start` + 1 on."""
    html = '<div class="code" style="counter-reset:line {}">\n{}</div>'
    return Markup(html).format(start, Markup().join(lines))


def fits_beside(text, hunks, width):
    """Return whether a text fits beside these hunks without leaving an empty area below them."""
    lines = sum(1 + len(paragraph) / width for paragraph in text.split("\n\n"))
    return 1.2 * lines < 6 + sum(len(hunk.lines) for hunk in hunks)  # code has a smaller font


def parts(diff):
    """Yield the two files in parts, from top to bottom: folded lines, and hunks with notes."""
    code, done = Code(diff), 0
    for number, hunk in enumerate(diff.hunks, 1):
        note, start = hunk.note, hunk.starts[1]
        yield from fold(diff, code, done, start)
        is_first = note.hunks[0] is hunk  # its note is shown here
        fits = is_first and fits_beside(note.text, [hunk], STEPS_WIDTH)
        part = {"note": note, "slug": hunk.slug, "number": number, "html": code.hunk(hunk)}
        yield {**part, "first": is_first, "beside": fits}
        following = diff.notes[diff.notes.index(note) + 1 :] if is_first else []
        for note in takewhile(lambda note: not note.hunks, following):
            yield {"note": note, "slug": note.slug, "first": True, "beside": False}
        done = start + sum(line[0] != "-" for line in hunk.lines)
    yield from fold(diff, code, done, len(diff.new_lines))


def fold(diff, code, start, end):
    """Yield a part that hides these lines until they are unfolded, if there are any."""
    if start < end:
        text = "\n".join(diff.new_lines[start:end])
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        yield {"names": names, "count": end - start, "html": code.fold(start, end)}


# ---------------------------------------------------------------- the page


def front(root):
    """Return the section of the front page that shows which lines a script needs."""
    text = (root / "README.md").read_text(encoding="utf-8")
    title, body = next((title, body) for _, title, body in sections(text) if "```diff\n" in body)
    before, after = re.split(r"```diff\n.*?^```\n", body, flags=re.DOTALL | re.MULTILINE)
    lines = Code(Diff(root / CONVERT / "train.py", root / CONVERT / "train_ddp.py")).brief()
    return {"title": title, "before": before, "lines": lines, "after": after}


def step(diff):
    """Return what the template shows for one step."""
    intro = diff.linked(lambda hunk: hunk.slug)
    shown = {"slug": diff.slug, "title": f"{diff.name}: {diff.title}", "diff": diff}
    return {**shown, "intro": FIGURE.sub("", intro), "parts": list(parts(diff))}


def tab(root, pages, kind):
    """Return what the template shows for the recipes, or for the pitfalls."""
    title, _, story, *_ = readme(root, kind).removeprefix("# ").split("\n\n")
    shown = []
    for page in (page for page in pages if page.kind == kind):
        code = Code(page.diff)
        html = [code.hunk(hunk) for hunk in page.diff.hunks]
        fits = fits_beside(page.text_without_patch, page.diff.hunks, PATCHES_WIDTH)
        shown.append({"patch": page, "hunks": html, "beside": fits})
    place = f"{kind}/README.md"
    slug = Path(kind).name
    return {"slug": slug, "place": place, "title": title, "story": story, "patches": shown}


def figures(kind):
    """Yield the name and the text of each of the figures' styles, scripts or data."""
    for path in sorted(FIGURES.glob(f"*.{kind}")):
        yield path.stem, Markup(path.read_text(encoding="utf-8").replace("</", r"<\/"))


def render(root, diffs, pages):
    """Return the page as HTML. A link to a section that is on this page leads to that section."""
    ids = {page.path: page.slug for page in pages}  # {path, with #anchor: id on this page}
    for diff in diffs:
        notes = {anchor(f"{diff.name}: {diff.title}"): diff.slug}
        notes |= {note.slug: f"{diff.slug}-{note.slug}" for note in diff.notes}
        notes |= {hunk.slug: f"{diff.slug}-{hunk.slug}" for hunk in diff.hunks}
        ids |= {f"diffs/README.md#{slug}": name for slug, name in notes.items()}
    lookup = {"slug": "troubleshooting", "title": "Troubleshooting: look up what you see"}
    lookup["entries"] = entries(root, ids)
    steps = list(map(step, diffs))
    tabs = [tab(root, pages, kind) for kind in KINDS]
    start = front(root)
    for one, following in pairwise([start, *steps, *tabs, lookup]):
        one["next"] = following
    shown = {"start": start, "steps": steps, "tabs": tabs, "lookup": lookup, "figures": figures}
    html = ENV.get_template("page.html.j2").render(shown)
    html = html.replace('href="../diffs/index.html#', 'href="#')
    away = r'(?<=href=")\.\./([^"]+)'
    return re.sub(away, lambda link: f"#{ids[link[1]]}" if link[1] in ids else link[0], html)
