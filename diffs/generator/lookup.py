"""What a reader looks up: the pages in lookup/, and those of four rooms."""

import base64
import gzip
import json
import re
from itertools import pairwise

from hunks import Problem, anchor, sections

ROOMS = (  # pages outside, whose sections are entries, too
    "convert/README.md",
    "without_slurm/README.md",
    "slurm/README.md",
    "slurm/faults.md",
    "benchmarks/README.md",
    "checker/README.md",
)
LIST = re.compile(r"(<!-- Written by diffs/generate.py -->\n\n)((?s:.*?))(?=\n<!-- end -->\n)")
NOISE = re.compile(r'File "[^"]*", line \d+(?:, in \S+)?|https?://\S+|[^\w\s/.:"\'-]')
FULL = re.compile(r"out[ -]of[ -]memory", re.IGNORECASE)  # says something
LINKED = re.compile(r"\]\(\.\./\w+/(\w+)\.md\)")


def weave(root, pages):
    """Return the index's pages, in its order, with links to recipes and pitfalls."""
    index = (root / "lookup" / "README.md").read_text(encoding="utf-8")
    paths = [root / "lookup" / name for name in re.findall(r"\]\((\w+\.md)\)", index)]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    lists = [found[2] for text in texts.values() for found in LIST.finditer(text)]
    named = [name for found in lists for name in linked(found)]
    wanted = {page.name for page in pages if page.rows}
    for name in sorted({*named, *wanted}):
        if named.count(name) != (name in wanted):
            raise Problem(f"lookup/: {name}: not in exactly one group, or has no rows")

    def written(found):
        lines = [found[1]]
        for page, seen, *_ in rows_of(found[2], pages):
            shown = page.title if seen.startswith("No error") else seen
            lines.append(f"- [{shown}](../{page.path})\n")
        return "".join(lines)

    return {path: LIST.sub(written, text) for path, text in texts.items()}


def linked(text):
    """Return the names of the pages to which a list links."""
    return list(dict.fromkeys(LINKED.findall(text)))


def rows_of(text, pages):
    """Return the rows of the pages to which a list links: [(page, symptom, cause, remedy)]."""
    named = {page.name: page for page in pages}
    return [(named[name], *row) for name in linked(text) for row in named[name].rows]


def entries(root, messages, pages, ids):
    """Return what the page shows of these pages, and add the id of each heading to the ids."""
    found = []
    rooms = {root / path: (root / path).read_text(encoding="utf-8") for path in ROOMS}
    for path, text in {**messages, **rooms}.items():
        place = path.relative_to(root).as_posix()
        stem = path.stem if path in messages else f"{path.parent.name}-room"
        for level, title, body in sections(text):
            name = f"see-{stem if level == 1 else anchor(title)[:50].rstrip('-')}"
            name = name if name not in ids.values() else f"{name}-{len(found)}"
            ids[f"{place}#{anchor(title)}" if level > 1 else place] = name
            listed = LIST.search(body)
            rows = rows_of(listed[2], pages) if listed else []
            entry = {"id": name, "level": level, "title": title, "place": place}
            found.append({**entry, "body": "" if rows else body, "rows": rows})
    for entry, following in pairwise([*found, {"level": 1}]):
        deeper = following["level"] > entry["level"] and not entry["body"].strip()
        entry["group"] = entry["level"] == 1 or entry["rows"] or deeper
    return found


def aliases(root, ids):
    """Return what else people type or paste for an entry or page: {id: [text]}, packed."""
    known = json.loads((root / "lookup" / "aliases.json").read_text(encoding="utf-8"))
    if gone := sorted(known.keys() - ids.keys()):
        raise Problem(f"lookup/aliases.json: no such heading or page: {gone[0]}")
    script = (root / "diffs" / "generator" / "search.js").read_text(encoding="utf-8")
    common = "|".join(re.search("COMMON = new Set.`([^`]+)", script)[1].split())
    needless = re.compile(rf"{NOISE.pattern}|\b(?:{common})\b(?![\w'/.]) ?", re.IGNORECASE)
    brief = {
        ids[name]: [" ".join(needless.sub(" ", FULL.sub("OOM", each)).split()) for each in texts]
        for name, texts in known.items()
    }
    text = json.dumps(brief, separators=(",", ":")).encode()
    page = (root / "diffs" / "index.html").read_text(encoding="utf-8")
    old = page.partition('id="aliases">')[2].partition("<")[0]
    if gzip.decompress(base64.b64decode(old)) == text:
        return old  # another zlib packs the same text in another way
    return base64.b64encode(gzip.compress(text, mtime=0)).decode()
