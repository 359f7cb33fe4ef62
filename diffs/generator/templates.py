"""The templates of what is generated, in this folder and in that of the figures."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "figures"  # per figure: its HTML, its script and its data, if it has any
ENV = Environment(
    loader=FileSystemLoader([HERE, FIGURES]),
    autoescape=select_autoescape(("html", "html.j2")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENV.globals["places"] = {  # the step, tab or hunk at which figures stand
    "01-to-02": ["one-step"],
    "01-to-02-wrap-the-model": ["where-the-time-goes"],
    "01-to-02-give-each-rank-its-share-of-the-data": ["who-gets-which"],
    "03-to-04": ["life-of-a-job"],
    "03-to-04-a-sampler-that-can-start-inside-an-epoch": ["who-resumes"],
    "04-to-05": ["who-is-counted"],
    "recipes": ["which-one"],
}
