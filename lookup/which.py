"""Which way of splitting a GPT fits: the memory of a rank, and what it sends in a step.

    python lookup/which.py 3e9 --nodes 2 --gpus 4 --memory 40

These are the formulae of which.md, which says where they come from and what they leave out. The
calculator on diffs/index.html computes the same. collectives.py counts what PyTorch really sends.
"""

import argparse
from dataclasses import dataclass

VOCABULARY = 50_000
SHARDED = ("fsdp2_gpt", "hybrid_sharding", "two_dimensional")  # cast to bf16 by FSDP2's policy
ROOM = 0.9  # of a GPU's memory: the rest is CUDA's, NCCL's, and lost to fragmentation
HEADING = ("method", "states", "in use", "activations", "together", "a rank sends", "a node sends")


@dataclass(frozen=True)
class Job:
    """A training step of a GPT on nodes of equal GPUs; each way takes it with the same batch."""

    parameters: float
    layers: float
    width: float
    nodes: int
    gpus: int  # per node
    tokens: int  # per GPU and step
    mixed: bool = True  # bf16, with parameters, gradients and AdamW's moments in float32
    checkpointed: bool = False

    @property
    def ranks(self):
        return self.nodes * self.gpus

    @property
    def value(self):
        """The bytes of an activation, and of a parameter while it is used."""
        return 2 if self.mixed else 4

    def stream(self, way):
        """Return the bytes of a value that passes a block by: autocast leaves it in float32."""
        return self.value if way in SHARDED else 4


def shape(parameters):
    """Return the layers and the width of a GPT that is 100 times as wide as it has layers.

    A block has 12 parameters for each square of the width: 4 in attention, and 8 in the MLP.
    """
    layers = (parameters / 12 / 100**2) ** (1 / 3)
    return layers, 100 * layers


WAYS = {
    "ddp": "DDP",
    "zero_optimizer": "ZeRO-1",
    "fsdp2_gpt": "FSDP2",
    "hybrid_sharding": "hybrid",
    "tensor_parallel": "tensor parallel",
    "two_dimensional": "2-D",
    "pipeline": "pipeline",
}
SIMPLEST = ("ddp", "zero_optimizer", "hybrid_sharding", "fsdp2_gpt", "two_dimensional", "pipeline")


def split(way, job):
    """Return into how many parts the parameters and the gradients are split, and the optimizer."""
    if way in ("ddp", "zero_optimizer"):
        return 1, 1 if way == "ddp" else job.ranks
    parts = job.gpus if way in ("hybrid_sharding", "tensor_parallel") else job.ranks
    return parts, parts


def memory(way, job):
    """Return the bytes of a rank: (states, in use, activations)."""
    parameters, optimizer = split(way, job)
    states = job.parameters * ((4 + 4) / parameters + 8 / optimizer)
    return states, in_use(way, job), activations(way, job)


def in_use(way, job):
    """Return the bytes of what exists only while it is used.

    In backward, FSDP2 has two blocks gathered, the gradients of a block, and those of another as
    they are summed, in float32. Elsewhere autocast has a copy of the parameters in bf16 until
    backward has used it.
    """
    if way in SHARDED:
        block = job.parameters / job.layers / (job.gpus if way == "two_dimensional" else 1)
        return (3 * job.value + 4) * block
    return 2 * job.parameters / split(way, job)[0] if job.mixed else 0


def activations(way, job):
    """Return the bytes of what forward keeps for backward, at the most.

    A block keeps 16 times its width for each token, two of them from the stream that passes it by,
    and with tensor parallelism the inputs of attention and of the MLP for the tokens of all its
    ranks. Under checkpointing, it keeps its input, and one block at a time keeps the rest. In a
    pipeline, a rank has fewer blocks, and as many more microbatches in flight. At the end of
    forward, there are the log-probabilities and two gradients of their size, in float32.
    """
    together = job.gpus if way in ("tensor_parallel", "two_dimensional") else 1
    stream = job.stream(way)
    saved = (12 + 2 * together) * job.value + 2 * stream
    kept = job.layers * stream + saved if job.checkpointed else job.layers * saved
    return job.tokens * (kept * job.width + 12 * VOCABULARY)


def ring(ranks):
    """Return the share of a tensor that a rank sends when it is gathered, or summed and scattered.

    An all-reduce does both (nccl-tests, doc/PERFORMANCE.md).
    """
    return (ranks - 1) / ranks


def sent(way, job):
    """Return the bytes that a rank sends in a step, on average: (inside its node, between nodes).

    In a ring over the ranks of several nodes, one rank of each node sends to the next node.
    """
    size, group = job.parameters, job.parameters / job.gpus
    gathered = 2 * job.value + 4  # twice for forward and backward; the gradients in float32
    stream = job.stream(way)
    activation = job.width * job.tokens * job.gpus  # of the ranks of a node
    around = {"ddp": 8, "zero_optimizer": 12, "fsdp2_gpt": gathered}
    if way in around:
        total = around[way] * size * ring(job.ranks)
        between = total / job.gpus if job.nodes > 1 else 0
        return total - between, between
    if way == "pipeline":
        total = 2 * activation * stream * job.nodes * ring(job.ranks)
        between = 2 * activation * stream * job.nodes * ring(job.nodes) / job.gpus
        return total - between, between
    each = 4 * (stream + job.value) * activation  # of a block: half of it from the stream
    inside = gathered * size if way == "hybrid_sharding" else job.layers * each
    across = gathered if way == "two_dimensional" else 8
    return inside * ring(job.gpus), across * group * ring(job.nodes)


def fits(way, job, limit):
    return sum(memory(way, job)) <= ROOM * limit and (way != "pipeline" or job.ranks <= job.layers)


def recommended(job, limit):
    """Return the simplest way that fits, or None."""
    ways = [way for way in SIMPLEST if job.nodes > 1 or way != "hybrid_sharding"]
    return next((way for way in ways if fits(way, job, limit)), None)


def rows(job, limit):
    """Yield a row for each way, under HEADING."""
    for way, name in WAYS.items():
        each = memory(way, job)
        inside, between = sent(way, job)
        together = f"{sum(each) / 1e9:,.1f} GB"
        together += "" if fits(way, job, limit) else ": no"
        sizes = (f"{size / 1e9:,.1f} GB" for size in (inside + between, between * job.gpus))
        yield (name, *(f"{size / 1e9:,.1f} GB" for size in each), together, *sizes)


def table(heading, *rows):
    """Return a Markdown table."""
    lines = [" | ".join(map(str, row)) for row in (heading, ["---"] * len(heading), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def parse_args():
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=style)
    parser.add_argument("parameters", type=float, help="of the model, such as 3e9")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--gpus", type=int, default=8, help="per node")
    parser.add_argument("--memory", type=float, default=80, help="of a GPU, in GB")
    parser.add_argument("--tokens", type=int, default=4096, help="per GPU and step")
    parser.add_argument("--checkpointed", action="store_true", help="activation checkpointing")
    args = parser.parse_args()
    if min(args.parameters, args.nodes, args.gpus, args.memory, args.tokens) <= 0:
        parser.error("each number must be above 0")
    return args


def main():
    args = parse_args()
    size = args.parameters, *shape(args.parameters), args.nodes, args.gpus, args.tokens
    job, limit = Job(*size, checkpointed=args.checkpointed), args.memory * 1e9
    print(table(HEADING, *rows(job, limit)))
    way = recommended(job, limit)
    print(f"\nThe simplest that fits: {WAYS[way]}" if way else "\nNothing fits.")


if __name__ == "__main__":
    main()
