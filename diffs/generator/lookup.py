"""What a reader looks up: the messages in lookup/, and the sections of other pages."""

import re

from hunks import Problem
from markdown_it import MarkdownIt
from markupsafe import Markup

GROUPS = (  # pages of messages, in the order of the index
    "starting",
    "hanging",
    "crashing",
    "wrong_results",
    "slow",
    "out_of_memory",
    "saving",
    "slurm",
    "several_machines",
    "notebooks_and_clouds",
    "harmless_warnings",
)
ASKED = (  # pages whose sections the search finds
    "lookup/questions.md",
    "lookup/which.md",
    "lookup/frameworks.md",
    "without_slurm/README.md",
    "slurm/README.md",
    "benchmarks/README.md",
    "checker/README.md",
)
HEAD = "| What you see | Why | What to type |\n|---|---|---|\n"
STRETCH = re.compile(
    r"(?P<begin><!-- Written by diffs/generate.py, from the tables of: (?P<names>[\w\s]+) -->\n)"
    r"(?s:.*?)(?P<end><!-- Written until here. -->\n)"
)
ROLES = {  # a table that is shown as a list of cards is one only by its roles
    "table_open": "table",
    "thead_open": "rowgroup",
    "tbody_open": "rowgroup",
    "tr_open": "row",
    "th_open": "columnheader",
    "td_open": "cell",
}


def weave(root, collections):
    """Return the pages of messages with the rows of the recipes and pitfalls written into them."""
    pages = {page.name: page for kind in collections.values() for page in kind if page.rows}
    paths = [root / "lookup" / f"{name}.md" for name in GROUPS]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    stretches = STRETCH.finditer("".join(texts.values()))
    named = [name for stretch in stretches for name in stretch["names"].split()]
    if wrong := sorted({*named} ^ {*pages}):
        raise Problem(f"lookup/: {wrong[0]}: in no group, or has no rows")

    def written(stretch):
        rows = "".join(rows_of(pages[name]) for name in stretch["names"].split())
        return f"{stretch['begin']}\n{HEAD}{rows}\n{stretch['end']}"

    return {path: STRETCH.sub(written, text) for path, text in texts.items()}


def rows_of(page):
    link = f"→ [{page.name}](../{page.path})"
    return "".join(f"| {seen} | {why} | {remedy} {link} |\n" for seen, why, remedy in page.rows)


def slug(title):
    """Return a heading's anchor, as forges write it."""
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")


def tables(texts, anchors):
    """Return the pages of messages as HTML; each row can be linked to.

    The anchors are those of pages that are part of this page: {link in Markdown: id}.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse("\n".join(re.sub("^#", "##", text, flags=re.M) for text in texts))
    taken, table = set(), None
    for token, after, third in zip(tokens, [*tokens[1:], None], [*tokens[2:], None, None]):
        if token.type in ROLES:
            token.attrSet("role", ROLES[token.type])
        if token.type == "th_open":
            token.attrSet("scope", "col")
            if after.content == "What you see":
                table.attrSet("class", "messages")
        if token.type == "table_open":
            table = token
        if token.type == "tr_open" and after.type == "td_open":
            token.attrSet("id", unique(f"see-{slug(third.content)}"[:60].rstrip("-"), taken))
        if token.type == "heading_open":
            token.attrSet("id", f"see-{slug(after.content)}")
        if token.type.startswith("heading"):
            token.tag = f"h{int(token.tag[1]) + 1}"
        for child in token.children or []:
            if child.type == "link_open":
                child.attrSet("href", moved(child.attrs["href"], anchors))
    return Markup(parser.renderer.render(tokens, parser.options, {}))


def unique(name, taken):
    """Return the name, with a number if it is taken."""
    names = [name, *(f"{name}-{number}" for number in range(2, 99))]
    free = next(each for each in names if each not in taken)
    taken.add(free)
    return free


def moved(link, anchors):
    """Return where a link of a page in lookup/ leads from the page."""
    if link.startswith("#"):
        return f"#see-{link[1:]}"
    if link.startswith("http"):
        return link
    name = link.removeprefix("../")
    if name in anchors:
        return f"#{anchors[name]}"
    return f"../{name}" if name != link else f"../lookup/{link}"


def sections(root):
    """Return the sections of the other pages: [(title of the page, [(title, link, words)])]."""
    return [section(path, (root / path).read_text(encoding="utf-8")) for path in ASKED]


def section(path, text):
    outside = re.sub(
        r"^```(?s:.*?)^```$", lambda fence: fence[0].replace("#", " "), text, flags=re.M
    )
    first, *parts = re.split(r"^##+ (.+)\n", outside, flags=re.M)
    shown = [
        (
            title,
            f"../{path}#{slug(title)}",
            " ".join(dict.fromkeys(re.findall(r"[^\W\d]\w+", body))),
        )
        for title, body in zip(parts[::2], parts[1::2])
    ]
    return first.splitlines()[0].strip("# "), shown
