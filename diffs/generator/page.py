"""The page diffs/index.html: both steps with what changes between them, notes beside the hunks."""

import re
from difflib import SequenceMatcher
from itertools import groupby, pairwise, takewhile

from holds import pictures
from hunks import Aside
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from patches import readme
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from templates import ENV, FIGURES

from lookup import entries

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
ALIKE = 0.5  # of lines less similar than this, no words are marked


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


def paint(pieces, marked=(0, 0)):
    """Return a line as HTML, with this range of characters marked as changed."""
    html, done = [], 0
    for css, text in pieces:
        edges = {min(max(edge - done, 0), len(text)) for edge in marked}
        for a, b in pairwise(sorted({0, len(text), *edges})):
            part = text[a:b]
            shown = Markup("<b class={}>{}</b>").format(css, part) if css else escape(part)
            inside = marked[0] <= done + a < marked[1]
            html.append(Markup("<mark>{}</mark>").format(shown) if inside else shown)
        done += len(text)
    return Markup().join(html).replace(Markup("</mark><mark>"), Markup())


def differing(old, new):
    """Return the range of characters between what two lines begin and end with: [old, new]."""
    start = alike_from_the_start(old, new)
    end = alike_from_the_start(old[start:][::-1], new[start:][::-1])
    return [(start, len(old) - end), (start, len(new) - end)]


def alike_from_the_start(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


# ---------------------------------------------------------------- stretches of lines


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
    """The lines of both files of a diff as HTML."""

    def __init__(self, diff):
        self.lines = diff.old_lines, diff.new_lines
        self.pieces = [highlight(lines) for lines in self.lines]

    def line(self, tag, number, marked=(0, 0)):
        """Return a line of the old file, if the tag is "del", or of the new one."""
        pieces = self.pieces[tag != "del"][number]
        return Markup("<{0}>{1}</{0}>\n").format(tag, paint(pieces, marked))

    def same(self, new, count):
        return Markup().join(self.line("span", new + n) for n in range(count))

    def changed(self, old, gone, new, come):
        """Return lines that go, and those that come in their place, with what differs marked."""
        both = self.lines[0][old : old + gone], self.lines[1][new : new + come]
        marks = [{}, {}]
        for places in alike(*both):
            ranges = differing(both[0][places[0]], both[1][places[1]])
            for side, place, marked in zip(marks, places, ranges):
                side[place] = marked
        html = [self.line("del", old + n, marks[0].get(n, (0, 0))) for n in range(gone)]
        html += [self.line("ins", new + n, marks[1].get(n, (0, 0))) for n in range(come)]
        return Markup().join(html)

    def hunk(self, hunk):
        old, new, html = hunk.old_start, hunk.new_start, []
        for kept, run in groupby(hunk.lines, key=lambda line: line[0] == " "):
            signs = [line[0] for line in run]
            gone, come = len(signs) - signs.count("+"), len(signs) - signs.count("-")
            html.append(self.same(new, come) if kept else self.changed(old, gone, new, come))
            old, new = old + gone, new + come
        return numbered(Markup().join(html), hunk.new_start)

    def fold(self, start, count):
        return numbered(self.same(start, count), start)


def numbered(html, start):
    """Return lines of code whose numbers count on from here."""
    return Markup('<div class="code" style="counter-reset:line {}">\n{}</div>').format(start, html)


def parts(diff):
    """Yield the whole of both files in parts: folded lines, and hunks with what follows them."""
    code, done = Code(diff), 0
    for number, hunk in enumerate(diff.hunks, 1):
        yield from fold(code, done, hunk.new_start - done)
        yield {"hunk": hunk, "number": number, "html": code.hunk(hunk)}
        for part in diff.told[diff.told.index(hunk) + 1 :]:
            if not isinstance(part, Aside):
                break
            yield {"aside": part}
        done = hunk.new_start + hunk.new_count
    yield from fold(code, done, len(diff.new_lines) - done)


def fold(code, start, count):
    """Yield a part that hides these lines until they are unfolded, if there are any."""
    if count:
        text = "\n".join(code.lines[1][start : start + count])
        names = re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)
        yield {"names": names, "count": count, "html": code.fold(start, count)}


# ---------------------------------------------------------------- the page


def markdown(root, collections):
    """Return a function that turns Markdown into HTML, with its pictures inlined."""
    parser = MarkdownIt("commonmark", {"html": False})
    slugs = {patch.name: patch.slug for members in collections.values() for patch in members}
    drawn = {path.name: text for path, text in pictures(root).items()}  # perhaps not written yet

    def picture(_, tokens, index, *__):
        path = root / "diffs" / tokens[index].attrs["src"]
        svg = drawn.get(path.name) or path.read_text(encoding="utf-8")
        return Markup('<span class="picture">{}</span>').format(Markup(svg[svg.index("<svg") :]))

    def on_page(link):  # pages that are no patches stay files
        return f"](#{slugs[link[1]]})" if link[1] in slugs else link[0]

    def to_html(text):
        return Markup(parser.render(LINK.sub(on_page, text)))

    parser.add_render_rule("image", picture)
    return to_html


def view(diff):
    """Return what the template shows for one step."""
    opening, _, story = here(diff, diff.story).partition("\n\n")
    story, mark, picture = story.partition("\n\n![")
    shown = {"slug": diff.slug, "title": f"{diff.name}: {diff.title}", "diff": diff}
    shown |= {"opening": opening, "story": story, "picture": (mark + picture).strip()}
    return {**shown, "parts": list(parts(diff))}


def here(diff, text):
    """Return a text of the notes whose links to other notes lead to them on the page."""
    return text.replace("](#", f"](#{diff.slug}-")


def tab(root, kind, members):
    """Return what the template shows for the patches of one kind."""
    title, _, story, *_ = readme(root, kind).removeprefix("# ").split("\n\n")
    shown = []
    for patch in members:
        code = Code(patch.diff)
        shown.append({"patch": patch, "hunks": [code.hunk(hunk) for hunk in patch.diff.hunks]})
    return {"slug": kind, "title": title, "story": story, "patches": shown}


def figures(kind):
    """Return the figures' scripts or data: [(name, text)]."""
    for path in sorted(FIGURES.glob(f"*.{kind}")):
        yield path.stem, Markup(path.read_text(encoding="utf-8").replace("</", r"<\/"))


def anchors(diffs, collections):
    """Return the ids on the page of what the pages of messages link to: {link: id}."""
    ids = {patch.path: patch.slug for members in collections.values() for patch in members}
    for diff in diffs:
        ids |= {f"diffs/README.md#{h.note.slug}": f"{diff.slug}-{h.note.slug}" for h in diff.hunks}
    return ids


def render(root, diffs, collections, messages, asked):
    """Return the page as HTML."""
    ENV.filters["markdown"] = markdown(root, collections)
    ENV.filters["inline"] = lambda text: Markup(MarkdownIt("commonmark").renderInline(text))
    ENV.globals |= {"figures": figures, "here": here}
    steps = list(map(view, diffs))
    tabs = [tab(root, *item) for item in collections.items()]
    lookup = {"slug": "troubleshooting", "title": "Troubleshooting: look up what you see"}
    found = entries(messages, collections, anchors(diffs, collections))
    lookup |= {"entries": found, "asked": asked}
    for one, following in pairwise([*steps, *tabs, lookup]):
        one["next"] = following
    return ENV.get_template("page.html.j2").render(steps=steps, tabs=tabs, lookup=lookup)
