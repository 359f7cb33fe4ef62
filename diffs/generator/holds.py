"""Pictures of which of four ranks holds what, diffs/pictures/holds-*.svg.

For each of WHAT, a way says which part each rank has: `0123` is a quarter for each rank, `0101` two
halves, each on two ranks, and `0000` the whole on all.
"""

WHAT = ("parameters", "gradients", "optimizer", "blocks", "batch")
WAYS = {  # title, who holds which part of WHAT, and what the colours do not show
    "ddp": (
        "DDP",
        ("0000", "0000", "0000", "0000", "0123"),
        "Gradients are summed over all ranks.",
    ),
    "zero_optimizer": (
        "ZeroRedundancyOptimizer",
        ("0000", "0000", "0123", "0000", "0123"),
        "After its step, each rank broadcasts what it updated.",
    ),
    "fsdp2_gpt": (
        "FSDP2",
        ("0123", "0123", "0123", "0000", "0123"),
        "A block is gathered from all ranks while it runs.",
    ),
    "hybrid_sharding": (
        "Hybrid sharding: two nodes of two ranks",
        ("0101", "0101", "0101", "0000", "0123"),
        "A block is gathered inside a node; nodes sum gradients.",
    ),
    "tensor_parallel": (
        "Tensor parallelism",
        ("0123", "0123", "0123", "0123", "0000"),
        "A part of each block; activations are sent.",
    ),
    "two_dimensional": (
        "2-D: tensor parallel inside, FSDP2 outside",
        ("0213", "0213", "0213", "0101", "0011"),
        "Half of each block is gathered across the nodes.",
    ),
    "pipeline": (
        "Pipeline",
        ("0123", "0123", "0123", "0123", "0000"),
        "Whole blocks; activations go from rank to rank.",
    ),
    "local_sgd": (
        "Local SGD",
        ("0000", "0000", "0000", "0000", "0123"),
        "Ranks differ until their parameters are averaged.",
    ),
}
RANKS = 4
WIDTH, HEIGHT, LEFT, CELL, ROW, BOX = 520, 272, 124, 96, 34, 20  # of a panel, and inside it
STYLE = """\
.NAME-picture { --paper: #fff; --panel: #f6f8fa; --line: #afb8c1; --ink: #1f2328;
  --muted: #59636e; --own: #54aeff; --own-line: #0969da }
@media (prefers-color-scheme: dark) {
.NAME-picture { --paper: #0d1117; --panel: #151b23; --line: #4d5661; --ink: #e6edf3;
  --muted: #9ea7b1; --own: #1f6feb; --own-line: #79c0ff }
}
.NAME-picture { fill: var(--ink);
  font: 16px system-ui, -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }
.NAME-paper { fill: var(--paper) }
.NAME-panel { fill: var(--panel); stroke: var(--line) }
.NAME-bold { font-weight: 600 }
.NAME-muted { fill: var(--muted) }
.NAME-held { fill: var(--own); stroke: var(--own-line) }
.NAME-free { fill: none; stroke: var(--line); stroke-dasharray: 3 3 }
"""


def held(line, rank):
    """Return which quarters a rank holds."""
    parts = len(set(line))
    return [quarter for quarter in range(4) if quarter * parts // 4 == int(line[rank])]


def panel(name, way, x, y):
    """Yield the SVG of one way, its upper left corner here."""
    title, lines, note = WAYS[way]
    yield f'<g data-way="{way}" transform="translate({x} {y})">'
    size = f'width="{WIDTH - 16}" height="{HEIGHT - 16}"'
    yield f'<rect class="{name}-panel" x="8" y="8" {size} rx="8"/>'
    yield f'<text class="{name}-bold" x="20" y="34">{title}</text>'
    for rank in range(RANKS):
        yield f'<text class="{name}-muted" x="{LEFT + CELL * rank}" y="60">rank {rank}</text>'
    for number, (what, line) in enumerate(zip(WHAT, lines, strict=True)):
        top = 70 + ROW * number
        yield f'<text x="20" y="{top + 16}">{what}</text>'
        for rank in range(RANKS):
            mine = held(line, rank)
            yield f'<g data-what="{what}" data-rank="{rank}" data-held="{"".join(map(str, mine))}">'
            for css in ("held", "free"):
                boxes = [n for n in range(4) if (n in mine) == (css == "held")]
                lefts = (LEFT + CELL * rank + BOX * n for n in boxes)
                d = "".join(f"M{left} {top}h{BOX - 2}v{BOX}h{2 - BOX}z" for left in lefts)
                if d:
                    yield f'<path class="{name}-{css}" d="{d}"/>'
            yield "</g>"
    yield f'<text class="{name}-muted" x="20" y="{HEIGHT - 18}">{note}</text>'
    yield "</g>"


def described(way):
    """Return a panel in words."""
    title, lines, note = WAYS[way]
    shares = {1: "all on each rank", 2: "half on each rank", 4: "a quarter on each rank"}
    said = (f"{what}, {shares[len(set(line))]}" for what, line in zip(WHAT, lines, strict=True))
    return f"{title}: {'; '.join(said)}. {note}"


def picture(name, ways):
    """Return an SVG with these ways, in two columns if there are several."""
    columns = min(2, len(ways))
    width, height = WIDTH * columns, HEIGHT * -(-len(ways) // columns)
    title = f"Which of four ranks holds what: {WAYS[ways[0]][0] if len(ways) == 1 else 'each way'}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    labels = f'role="img" aria-labelledby="{name}-title {name}-desc"'
    places = [(WIDTH * (n % columns), HEIGHT * (n // columns)) for n in range(len(ways))]
    panels = (line for way, place in zip(ways, places) for line in panel(name, way, *place))
    lines = [
        "<!-- Written by diffs/generate.py: edit diffs/generator/holds.py. -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}-picture" {size} '
        f'style="max-width:100%;height:auto" {labels}>',
        f'<title id="{name}-title">{title}</title>',
        f'<desc id="{name}-desc">{" ".join(map(described, ways))}</desc>',
        f"<style>\n{STYLE.replace('NAME', name)}</style>",
        f'<rect class="{name}-paper" width="{width}" height="{height}" rx="8"/>',
        *panels,
        "</svg>\n",
    ]
    return "\n".join(lines)


def pictures(folder):
    """Return the pictures, {path: text}: one for each way, and one with all of them."""
    each = {f"holds-{way}": [way] for way in WAYS if way != "ddp"}
    return {
        folder / f"{name}.svg": picture(name, ways)
        for name, ways in [*each.items(), ("holds", [*WAYS])]
    }
