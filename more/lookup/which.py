"""Which way of splitting a GPT fits: the memory that DDP, ZeRO-1, FSDP2 and hybrid sharding take.

    python more/lookup/which.py 3e9 --nodes 2 --gpus 4 --memory 40

The calculator on diffs/index.html computes the same. The numbers of large_models.md are from here.
"""

import argparse
from dataclasses import dataclass

VOCABULARY = 50_000
WAYS = {
    "ddp": "DDP",
    "zero_optimizer": "ZeRO-1",
    "fsdp2_gpt": "FSDP2",
    "hybrid_sharding": "hybrid",
}
SIMPLEST = ("ddp", "zero_optimizer", "hybrid_sharding", "fsdp2_gpt")
SHARDED = ("fsdp2_gpt", "hybrid_sharding")  # cast to bf16 by FSDP2's policy
ROOM = 0.9  # share of a GPU's memory: the rest is CUDA's, NCCL's, and lost to fragmentation
HEADING = ("method", "states", "in use", "activations", "together")


@dataclass(frozen=True)
class Job:
    """A training step of a GPT on nodes of equal GPUs."""

    parameters: float
    layers: float
    width: float
    nodes: int
    gpus: int  # per node
    tokens: int  # per GPU and step
    mixed: bool = True  # bf16, with parameters, gradients and AdamW's moments in float32
    checkpointed: bool = False

    @property
    def value(self):
        """The bytes of an activation, and of a parameter while it is used."""
        return 2 if self.mixed else 4


def shape(parameters):
    """Return the layers and the width of a GPT that is 100 times as wide as it has layers.

    A block has 12 parameters for each square of the width: 4 in attention, and 8 in the MLP.
    """
    layers = (parameters / 12 / 100**2) ** (1 / 3)
    return layers, 100 * layers


def memory(way, job):
    """Return the bytes of a rank: (states, in use, activations)."""
    ranks = job.nodes * job.gpus
    parts = {"hybrid_sharding": job.gpus, "fsdp2_gpt": ranks}.get(way, 1)
    optimizer = ranks if way == "zero_optimizer" else parts
    states = job.parameters * ((4 + 4) / parts + 8 / optimizer)
    return states, in_use(way, job), activations(way, job)


def in_use(way, job):
    """Return the bytes of what exists only while it is used.

    In backward, FSDP2 has two blocks gathered, the gradients of a block, and those of another as
    they are summed, in float32. Elsewhere autocast has a copy of the parameters in bf16 until
    backward has used it.
    """
    if way in SHARDED:
        return (3 * job.value + 4) * job.parameters / job.layers
    return 2 * job.parameters if job.mixed else 0


def activations(way, job):
    """Return the bytes of what forward keeps for backward, at the most.

    A block keeps 16 times its width for each token, two of them from the stream that passes it by,
    which autocast leaves in float32. Under checkpointing, it keeps its input, and one block at a
    time keeps the rest. At the end of forward, there are the log-probabilities and two gradients of
    their size, in float32.
    """
    stream = job.value if way in SHARDED else 4
    saved = 14 * job.value + 2 * stream
    kept = job.layers * stream + saved if job.checkpointed else job.layers * saved
    return job.tokens * (kept * job.width + 12 * VOCABULARY)


def fits(way, job, limit):
    return sum(memory(way, job)) <= ROOM * limit


def recommended(job, limit):
    """Return the simplest way that fits, or None."""
    ways = [way for way in SIMPLEST if job.nodes > 1 or way != "hybrid_sharding"]
    return next((way for way in ways if fits(way, job, limit)), None)


def rows(job, limit):
    """Yield a row of text for each way, under HEADING."""
    for way, name in WAYS.items():
        sizes = memory(way, job)
        *texts, together = (f"{size / 1e9:,.1f} GB" for size in (*sizes, sum(sizes)))
        yield name, *texts, together + ("" if fits(way, job, limit) else ": no")


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
    for row in (HEADING, *rows(job, limit)):
        print("{:8} {:>13} {:>10} {:>12} {:>15}".format(*row))
    way = recommended(job, limit)
    print(f"The simplest that fits: {WAYS[way]}" if way else "Nothing fits.")


if __name__ == "__main__":
    main()
