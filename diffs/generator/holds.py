"""Pictures of which of four ranks holds what, diffs/pictures/holds-*.svg.

For each of WHAT, a way says which part each rank has: `0123` is a quarter for each rank, `0101` two
halves, each on two ranks, and `0000` the whole on all.
"""

from templates import ENV

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
SHARES = {1: "all on each rank", 2: "half on each rank", 4: "a quarter on each rank"}


def held(line):
    """Return which quarters each rank holds."""
    parts = len(set(line))
    return [[n for n in range(4) if n * parts // 4 == int(part)] for part in line]


def shown(name):
    """Return what the picture shows of a way."""
    title, lines, note = WAYS[name]
    said = "; ".join(f"{what}, {SHARES[len(set(line))]}" for what, line in zip(WHAT, lines))
    found = {"title": title, "note": note, "described": f"{title}: {said}. {note}"}
    return {**found, "held": [(what, held(line)) for what, line in zip(WHAT, lines)]}


def pictures(folder):
    """Return the pictures, {path: text}: one for each way, and one with all of them."""
    found = {}
    for name in ["", *WAYS]:
        ways = [shown(way) for way in WAYS if name in ("", way)]
        size = {"width": 520 * min(2, len(ways)), "height": 272 * -(-len(ways) // 2)}
        path = folder / f"holds{'-' * bool(name)}{name}.svg"
        if name != "ddp":
            picture = ENV.get_template("holds.svg.j2")
            found[path] = picture.render(name=path.stem, ways=ways, **size)
    return found
