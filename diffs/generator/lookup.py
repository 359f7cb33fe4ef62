"""What a reader looks up: the messages in lookup/, and the sections of other pages."""

import re
from collections import Counter

from hunks import Problem, anchor
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

ASKED = (  # pages whose sections the search finds
    "lookup/questions.md",
    "lookup/data_and_models.md",
    "lookup/which.md",
    "lookup/frameworks.md",
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
    """Return the pages of messages, in the index's order, with links to recipes and pitfalls."""
    pages = with_rows(collections)
    index = (root / "lookup" / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"^\|[^|]*\| \[[^]]+\]\((\w+\.md)\)", index, re.M)
    paths = [root / "lookup" / name for name in names if f"lookup/{name}" not in ASKED]
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
    """Return the pages of messages as HTML: each entry is a division that can be linked to.

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
    data = f'data-why="{plain(why)}" data-type="{plain(remedy)}"'
    return f'<li {data}><a href="#{link}">{parser.renderInline(seen)}</a></li>\n'


def plain(text):
    """Return Markdown as text for an attribute."""
    return escape(re.sub(r"\]\([^)]*\)|\[(?=[^\]]*\]\()|`", "", text))


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
    name = link.removeprefix("../")
    if name in ids:
        return f"#{ids[name]}"
    return f"../{name}" if name != link else f"../lookup/{link}"


# ---------------------------------------------------------------- the sections of other pages


def sections(root):
    """Return the sections of the other pages: [(title of the page, [Section])]."""
    found = [(path, [*parts((root / path).read_text(encoding="utf-8"))]) for path in ASKED]
    spoken = Counter(word for _, page in found for *_, body in page for word in words(body))
    often = {word for word, count in spoken.items() if count > 40}
    return [
        (page[0][1], [section(path, *part[1:], often) for part in page[1:]]) for path, page in found
    ]


def words(body):
    return {word.lower() for word in re.findall(r"[^\W\d]\w{2,}", body)}


def section(path, title, body, often):
    """Return the title, the address, the first sentence, what to type, and the rarer words."""
    prose = re.sub(r"\s+", " ", plain(FENCE.sub("", body)))
    first = re.match(r".{0,160}?[.:?!](?= |$)|.{0,120}", prose.strip())[0]
    codes = [fence["code"].rstrip() for fence in FENCE.finditer(body) if fence["language"]]
    typed = codes[0] if codes and codes[0].count("\n") < 6 else ""
    rare = " ".join(sorted(words(body) - often - words(title) - words(first) - words(typed)))
    return title, f"../{path}#{anchor(title)}", first, typed, rare
