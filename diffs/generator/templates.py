"""The templates, from this folder and diffs/figures/, and the conversion of Markdown to HTML."""

from pathlib import Path
from urllib.parse import urljoin

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIGURES = HERE.parent / "figures"  # each figure has HTML, a script and perhaps data
ENV = Environment(
    loader=FileSystemLoader([HERE, FIGURES]),
    autoescape=select_autoescape(("html", "html.j2")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
PARSER = MarkdownIt("commonmark").enable("table")


def markdown(text, place="diffs/README.md"):
    """Return Markdown of the page at this path as HTML for a page in diffs/."""
    return Markup(PARSER.render(text, {"place": place}))


def inline(text):
    """Return a line of Markdown as HTML."""
    return Markup(PARSER.renderInline(text, {"place": "diffs/README.md"}))


def adapt(state):
    """Make the links that have been parsed start in diffs/, where the page is."""
    for child in [child for token in state.tokens for child in token.children or []]:
        if child.type == "link_open" and not child.attrs["href"].startswith("http"):
            child.attrSet("href", f"../{urljoin(state.env['place'], child.attrs['href'])}")


def picture(_, tokens, index, __, env):
    """Return a picture as HTML, but only on pages of diffs/, more/recipes/ and more/pitfalls/."""
    if not env["place"].startswith(("diffs/", "more/recipes/", "more/pitfalls/")):
        return ""
    path = ROOT / urljoin(env["place"], tokens[index].attrs["src"])
    svg = path.read_text(encoding="utf-8")
    return f'<span class="picture">{svg[svg.index("<svg") :]}</span>'


PARSER.core.ruler.push("adapt", adapt)
PARSER.add_render_rule("image", picture)
ENV.filters |= {"markdown": markdown, "inline": inline}
