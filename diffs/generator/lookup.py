"""What a reader looks up: the messages in lookup/, and the sections of other pages."""

import re
from collections import Counter
from itertools import dropwhile

from hunks import Problem, anchor
from markdown_it import MarkdownIt
from markupsafe import Markup

ASKED = (  # pages outside, whose sections the search finds
    "without_slurm/README.md",
    "slurm/README.md",
    "benchmarks/README.md",
    "checker/README.md",
)
STRETCH = re.compile(
    r"(?P<begin><!-- Written by diffs/generate.py -->\n)(?P<list>(?s:.*?))(?P<end><!-- end -->\n)"
)
LINKED = re.compile(r"\]\(\.\./\w+/(\w+)\.md\)")
BLOCK = re.compile(r"^```(?s:.*?)^```$|(?:^.+\n)+(?:\n+(?: .*\n)+)*", re.M)
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


def entries(messages, collections, anchors):
    """Return the pages in lookup/ as HTML: each entry is a division that can be linked to.

    The anchors are those of pages that are part of this page: {link in Markdown: id}.
    """
    pages, ids, found = with_rows(collections), dict(anchors), []
    for path, text in messages.items():
        for level, title, body in parts(text):
            name = f"see-{path.stem if level == 1 else anchor(title)[:50].rstrip('-')}"
            name = name if name not in ids.values() else f"{name}-{len(found)}"
            ids[f"{path.name}#{anchor(title)}" if level > 1 else path.name] = name
            found.append((level, title, re.sub(r"\]\(#", f"]({path.name}#", body), name))
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.add_render_rule("image", lambda *_: "")  # the recipes show theirs
    return Markup("").join(
        shown(parser, part, following, ids, pages)
        for part, following in zip(found, [*found[1:], (1,)])
    )


def shown(parser, part, following, ids, pages):
    level, title, body, name = part
    heading = parser.renderInline(title)
    if stretch := STRETCH.search(body):
        items = (item(parser, row, ids) for row in rows_of(stretch, pages))
        text = f'<ul class="pages">\n{"".join(items)}</ul>\n'
    else:
        text = html(parser, body, ids)
    group = level == 1 or following[0] > level or stretch
    if group:
        return Markup(f'<h{level + 2} id="{name}">{heading}</h{level + 2}>\n{text}')
    head = f"<h{level + 2}>{heading}</h{level + 2}>\n"
    return Markup(f'<div class="entry" id="{name}">\n{head}{text}</div>\n')


def item(parser, row, ids):
    """Return a message that has a page of its own, with what the search shows of it."""
    page, seen, why, remedy = row
    link = ids.get(f"{page.path}", "")
    why, remedy = (unlinked(parser.renderInline(text)) for text in (why, remedy))
    command = re.fullmatch(r"<code>[^<]*</code>", remedy)
    remedy = f"<pre>{remedy}</pre>" if command else f"<p>{remedy}</p>"
    shown = f"<div hidden><p>{why}</p>\n{remedy}</div>"
    return f'<li><a href="#{link}">{parser.renderInline(seen)}</a>{shown}</li>\n'


def unlinked(html):
    return re.sub(r"</?a\b[^>]*>", "", html)


def html(parser, body, ids):
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
                child.attrSet("href", moved(child.attrs["href"], ids))
    return parser.renderer.render(tokens, parser.options, {})


def moved(link, ids):
    """Return where a link of a page in lookup/ leads from the page."""
    if link.startswith("http"):
        return link
    name = link.removeprefix("../").removeprefix("diffs/index.html")
    if name in ids or name.startswith("#"):
        return f"#{ids.get(name, name[1:])}"
    return f"../{name}" if name != link else f"../lookup/{link}"


# ---------------------------------------------------------------- the sections of other pages


def sections(root):
    """Return the sections of the other pages: [(title of the page, [Section])]."""
    found = [(path, [*parts((root / path).read_text(encoding="utf-8"))]) for path in ASKED]
    return [(page[0][1], [section(path, *part[1:]) for part in page[1:]]) for path, page in found]


def words(body):
    return {word.lower() for word in re.findall(r"[^\W\d]\w{2,}", body)}


def section(path, title, body):
    """Return the title, the address, the opening as HTML, and the other words."""
    blocks = BLOCK.findall(body)
    also = [block for block in blocks if block.startswith("Also: ")]
    rest = [block for block in blocks if block not in also]
    prose = dropwhile(lambda block: block.startswith(("|", "<", "!", "```")), rest)
    first, *behind = [*prose] or [""]
    short = [block for block in behind if re.match(r"```\w", block) and block.count("\n") < 8]
    colon = behind[:1] if first.rstrip().endswith(":") else []
    shown = "\n\n".join(dict.fromkeys([first, *colon, *short[:1], *also]))
    parser = MarkdownIt("commonmark").enable("table")
    other = " ".join(sorted(words(body) - words(title) - words(shown)))
    return title, f"../{path}#{anchor(title)}", Markup(unlinked(parser.render(shown))), other
