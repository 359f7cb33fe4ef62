"""What the pages of more/lookup/ say, entry by entry, and the code that they do not mark with †."""

import re
from itertools import pairwise
from typing import NamedTuple

from support.scripts import ROOT

FENCE = re.compile(r"(?P<before>.*\n)\n```(?P<language>\w+)\n(?P<code>(?s:.*?))^```$", re.MULTILINE)
COMMAND = re.compile(
    r"`((?:[A-Z][A-Z_0-9]+=[^`\s]*|(?:export|unset|kill|rm|ulimit|free|ps|pip|scontrol|sudo) |"
    r"srun (?!python|torchrun|bash -c)|torchrun -)[^`]*)`(?! †)"
)


class Block(NamedTuple):
    page: str
    title: str
    language: str
    code: str


def entries():
    """Yield (page, title, text) for each entry."""
    for path in sorted(ROOT.glob("more/lookup/*.md")):
        for part in re.split(r"^##+ ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            title, _, text = part.partition("\n")
            yield path.stem, title, text


def tried():
    """Return the blocks without †, which marks a line or, at the end of a sentence, a block."""
    found = []
    for page, title, text in entries():
        for block in FENCE.finditer(text):
            if not block["before"].rstrip().endswith("†:"):
                lines = [line for line in block["code"].splitlines() if "†" not in line]
                found.append(Block(page, title, block["language"], "\n".join([*lines, ""])))
    return found


def inside_sentences():
    """Return the commands and settings of variables inside sentences and lists, without a †."""
    found = []
    for _, _, text in entries():
        paragraphs = re.sub("^<!--.*|^```(?s:.*?)^```", "", text, flags=re.M).split("\n\n")
        for before, paragraph in pairwise(["", *paragraphs]):
            if not before.endswith("†:"):
                found += [" ".join(code.split()) for code in COMMAND.findall(paragraph)]
    return found


def blocks(start, language="python"):
    """Return the code in the entry whose title starts like this."""
    titles = {(page, title) for page, title, _ in entries() if title.startswith(start)}
    assert len(titles) == 1, (start, titles)
    place = titles.pop()
    return [each.code for each in tried() if each[:2] == place and each.language == language]
