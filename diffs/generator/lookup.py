"""What readers look up: the sections of the pages in more/lookup/ and of some pages elsewhere."""

import re
from itertools import pairwise

from hunks import anchor, sections, split_words

LOOKUP = "more/lookup"
SEARCHED = (  # pages elsewhere whose sections the search also finds
    "convert/README.md",
    "more/without_slurm/README.md",
    "slurm/README.md",
    "slurm/faults.md",
    "more/benchmarks/README.md",
    "more/checker/README.md",
)


def paths(root):
    """Return the paths of these pages, starting with more/lookup/ in the order of its README.md."""
    index = (root / LOOKUP / "README.md").read_text(encoding="utf-8")
    names = ["README.md", *dict.fromkeys(re.findall(r"\]\((\w+\.md)\)", index))]
    return [*(f"{LOOKUP}/{name}" for name in names), *SEARCHED]


def entries(root, ids):
    """Return the sections of these pages, and add the id of each heading to `ids`."""
    found = []
    for path in paths(root):
        folder, stem = (root / path).parent.name, (root / path).stem
        page = f"{folder}-{stem}".lower() if path in SEARCHED else stem.lower()
        for level, title, text in sections((root / path).read_text(encoding="utf-8")):
            words, body = split_words(text)
            name = f"see-{page if level == 1 else anchor(title)[:50].rstrip('-')}"
            name = name if name not in ids.values() else f"{name}-{len(found)}"
            ids[f"{path}#{anchor(title)}" if level > 1 else path] = name
            entry = {"id": name, "level": level, "title": title, "place": path}
            found.append({**entry, "words": words, "body": body})
    for entry, following in pairwise([*found, {"level": 1}]):
        deeper = following["level"] > entry["level"] and not entry["body"].strip()
        entry["is_group"] = entry["level"] == 1 or deeper
    return found
