"""What a reader looks up: the pages in lookup/, and those of four rooms."""

import re
from collections import Counter
from posixpath import dirname, join, normpath

from hunks import Problem, anchor
from markdown_it import MarkdownIt
from markupsafe import Markup

ROOMS = (  # pages outside, whose sections are entries, too
    "without_slurm/README.md",
    "slurm/README.md",
    "benchmarks/README.md",
    "checker/README.md",
)
STRETCH = re.compile(
    r"(?P<begin><!-- Written by diffs/generate.py -->\n)(?P<list>(?s:.*?))(?P<end><!-- end -->\n)"
)
LINKED = re.compile(r"\]\(\.\./\w+/(\w+)\.md\)")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>(?s:.*?))^```$", re.M)
ROLES = {  # a table that is shown as a list of cards is one only by its roles
    "table_open": "table",
    "thead_open": "rowgroup",
    "tbody_open": "rowgroup",
    "tr_open": "row",
    "th_open": "columnheader",
    "td_open": "cell",
}


# ---------------------------------------------------------------- the pages in lookup/


def weave(root, collections):
    """Return the index's pages, in its order, with links to recipes and pitfalls."""
    pages = with_rows(collections)
    index = (root / "lookup" / "README.md").read_text(encoding="utf-8")
    paths = [root / "lookup" / name for name in re.findall(r"\]\((\w+\.md)\)", index)]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    stretches = STRETCH.finditer("".join(texts.values()))
    named = Counter(name for stretch in stretches for name in {*LINKED.findall(stretch["list"])})
    if wrong := sorted(named - Counter(pages.keys()) + (Counter(pages.keys()) - named)):
        raise Problem(f"lookup/: {wrong[0]}: not in exactly one group, or has no rows")

    def written(stretch):
        lines = "".join(map(line_of, rows_of(stretch, pages)))
        return f"{stretch['begin']}\n{lines}\n{stretch['end']}"

    return {path: STRETCH.sub(written, text) for path, text in texts.items()}


def with_rows(collections):
    return {page.name: page for kind in collections.values() for page in kind if page.rows}


def rows_of(stretch, pages):
    names = dict.fromkeys(LINKED.findall(stretch["list"]))
    return [(pages[name], *row) for name in names for row in pages[name].rows]


def line_of(row):
    page, seen, _, _ = row
    return f"- [{seen.removeprefix('No error. ')}](../{page.path})\n"


def parts(text):
    """Yield the parts of a page: [(level of its heading, heading, text)]."""
    outside = FENCE.sub(lambda fence: fence[0].replace("#", "\0"), text)
    _, *found = re.split(r"^(#+) (.+)\n", outside, flags=re.M)
    for marks, title, body in zip(found[::3], found[1::3], found[2::3]):
        yield len(marks), title, body.replace("\0", "#")


# ---------------------------------------------------------------- the tab of the page


def entries(root, messages, collections, anchors):
    """Return the pages as HTML, and {address of what is on the page: its id}, the anchors too."""
    pages, ids, found = with_rows(collections), dict(anchors), []
    rooms = {root / path: (root / path).read_text(encoding="utf-8") for path in ROOMS}
    for path, text in {**messages, **rooms}.items():
        place = path.relative_to(root).as_posix()
        stem = path.stem if path in messages else f"{path.parent.name}-room"
        for level, title, body in parts(text):
            name = f"see-{stem if level == 1 else anchor(title)[:50].rstrip('-')}"
            name = name if name not in ids.values() else f"{name}-{len(found)}"
            ids[f"{place}#{anchor(title)}" if level > 1 else place] = name
            found.append((level, title, body, name, place))
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.add_render_rule("image", lambda *_: "")  # the recipes show theirs
    following = (level for level, *_ in [*found[1:], (1,)])
    divisions = (shown(parser, pages, *part) for part in zip(found, following))
    return Markup("").join(divisions), ids


def shown(parser, pages, part, following):
    level, title, body, name, place = part
    heading = parser.renderInline(title)
    if stretch := STRETCH.search(body):
        items = (item(parser, row) for row in rows_of(stretch, pages))
        text = f'<ul class="pages">\n{"".join(items)}</ul>\n'
    else:
        text = html(parser, body, place)
    if level == 1 or stretch or (following > level and not text):
        return Markup(f'<h{level + 2} id="{name}">{heading}</h{level + 2}>\n{text}')
    head = f"<h{level + 2}>{heading}</h{level + 2}>\n"
    return Markup(f'<div class="entry" id="{name}">\n{head}{text}</div>\n')


def item(parser, row):
    """Return a message that has a page of its own, with what the search shows of it."""
    page, seen, why, remedy = row
    why, remedy = (unlinked(parser.renderInline(text)) for text in (why, remedy))
    command = re.fullmatch(r"<code>[^<]*</code>", remedy)
    remedy = f"<pre>{remedy}</pre>" if command else f"<p>{remedy}</p>"
    shown = f"<div hidden><p>{why}</p>\n{remedy}</div>"
    return f'<li><a href="#{page.slug}">{parser.renderInline(seen)}</a>{shown}</li>\n'


def unlinked(html):
    return re.sub(r"</?a\b[^>]*>", "", html)


def html(parser, body, place):
    tokens = parser.parse(body)
    for token in tokens:
        if token.type in ROLES:
            token.attrSet("role", ROLES[token.type])
        if token.type == "th_open":
            token.attrSet("scope", "col")
        if token.type == "fence":
            token.info = ""
        for child in token.children or []:
            if child.type == "link_open":
                child.attrSet("href", moved(child.attrs["href"], place))
    return parser.renderer.render(tokens, parser.options, {})


def moved(link, place):
    """Return where a link of the page at this place leads from diffs/."""
    path, mark, part = link.partition("#")
    path = normpath(join(dirname(place), path)) if path else place
    return link if link.startswith("http") else f"../{path}{mark}{part}"
