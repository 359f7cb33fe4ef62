"""Pictures of which of four ranks holds what, diffs/pictures/holds-*.svg."""

from templates import ENV

WHAT = ("parameters", "gradients", "optimizer", "blocks", "batch")
# The title of each way, and which part each rank holds of WHAT: `0123` is a quarter on each,
# `0101` two halves, each on two ranks, and `0000` the whole on all.
WAYS = {
    "ddp": ("DDP", "0000 0000 0000 0000 0123"),
    "zero_optimizer": ("ZeroRedundancyOptimizer", "0000 0000 0123 0000 0123"),
    "fsdp2_gpt": ("FSDP2", "0123 0123 0123 0000 0123"),
    "hybrid_sharding": ("Hybrid sharding: two nodes of two ranks", "0101 0101 0101 0000 0123"),
    "tensor_parallel": ("Tensor parallelism", "0123 0123 0123 0123 0000"),
    "two_dimensional": ("2-D: tensor parallel inside, FSDP2 outside", "0213 0213 0213 0101 0011"),
    "pipeline": ("Pipeline", "0123 0123 0123 0123 0000"),
    "local_sgd": ("Local SGD", "0000 0000 0000 0000 0123"),
}
NOTES = {  # what the colours do not show
    "ddp": "Gradients are summed over all ranks.",
    "zero_optimizer": "After its step, each rank broadcasts what it updated.",
    "fsdp2_gpt": "A block is gathered from all ranks while it runs.",
    "hybrid_sharding": "A block is gathered inside a node; nodes sum gradients.",
    "tensor_parallel": "A part of each block; activations are sent.",
    "two_dimensional": "Half of each block is gathered across the nodes.",
    "pipeline": "Whole blocks; activations go from rank to rank.",
    "local_sgd": "Ranks differ until their parameters are averaged.",
}
SHARES = {1: "all on each rank", 2: "half on each rank", 4: "a quarter on each rank"}


def shown(name):
    """Return what the picture shows of a way: of each of WHAT, the quarters on each rank."""
    title, lines = WAYS[name]
    held, said = [], []
    for what, line in zip(WHAT, lines.split()):
        count = len(set(line))
        held.append((what, [[n for n in range(4) if n * count // 4 == int(part)] for part in line]))
        said.append(f"{what}, {SHARES[count]}")
    note = NOTES[name]
    described = f"{title}: {'; '.join(said)}. {note}"
    return {"title": title, "held": held, "note": note, "described": described}


def pictures(folder):
    """Yield the path and the text of a picture of each way but DDP, and of one of all ways."""
    every = {name: shown(name) for name in WAYS}
    drawn = {"holds": [*every.values()]} | {f"holds-{name}": [way] for name, way in every.items()}
    del drawn["holds-ddp"]
    for name, ways in drawn.items():
        text = ENV.get_template("holds.svg.j2").render(name=name, ways=ways)
        yield folder / f"{name}.svg", text
