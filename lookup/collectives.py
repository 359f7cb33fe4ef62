"""Count the collectives of a training step of a GPT under DDP, FSDP2 and 2-D, up to 4,096 ranks.

    python lookup/collectives.py

It takes a single process. PyTorch's fake process group pretends to have any number of ranks and
sends nothing, so rank 0 calls what it would call among them, with the same shapes. 2-D splits the
tensors over the 8 ranks of a node, and shards what is left across nodes.
"""

import ast
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from which import ring, table

GPT = Path(__file__).resolve().parent.parent / "exercise" / "solution.py"
WORLDS = (64, 4096)
NODE = 8  # ranks per node
SHAPE = {"width": 512, "layers": 4, "heads": 8, "context": 64, "characters": range(1000)}
TOKENS = NODE * SHAPE["context"]  # of the ranks of a node, which share them in 2-D
KINDS = {  # of the operators: the collective, and which argument is the whole tensor
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "all_gather_into_tensor": ("all-gather", 0),  # of which each rank brings a part
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "all_reduce": ("all-reduce", 0),
}


class Collectives(TorchDispatchMode):
    """Notes the collectives that are called: [(of what, collective, bytes of all ranks' parts)].

    FSDP2 calls those of c10d, and DTensor, which splits activations, those that it can
    differentiate.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes back as operators on plain tensors
        library, _, name = function._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional") and name in KINDS:
            kind, position = KINDS[name]
            parts = NODE if name == "all_gather_into_tensor" else 1
            what = "parameters" if library == "c10d" else "activations"
            self.calls.append((what, kind, parts * args[position].nbytes))
        return function(*args, **(kwargs or {}))


def gpt():
    """Return the exercise's GPT in our shape, and the globals that its forward pass reads."""
    tree = ast.parse(GPT.read_text(encoding="utf-8"))
    classes = [part for part in tree.body if isinstance(part, ast.ClassDef)]
    wanted = [part for part in classes if part.name in ("Attention", "Block", "GPT")]
    names = {"torch": torch, "nn": nn, "F": F, **SHAPE}
    exec(compile(ast.Module(wanted, []), "solution.py", "exec"), names)
    return names["GPT"](), names


def trained(model, samples):
    """Take a step without an optimizer."""
    x = torch.zeros(samples, SHAPE["context"], dtype=torch.long)
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()


def ddp(ranks):
    """A communication hook is called for each bucket, instead of its all-reduce."""
    model, calls = DDP(gpt()[0]), []

    def hook(_, bucket):
        calls.append(("parameters", "all-reduce", bucket.buffer().nbytes))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    trained(model, samples=1)
    calls.clear()  # from the second step on, the buckets stay as they are
    trained(model, samples=1)
    return calls


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp2(ranks):
    model, _ = gpt()
    shard(model, init_device_mesh("cpu", (ranks,)))
    with Collectives() as collectives:
        trained(model, samples=1)
    return collectives.calls


def two_dimensional(ranks):
    model, names = gpt()
    mesh = init_device_mesh("cpu", (ranks // NODE, NODE), mesh_dim_names=("nodes", "node"))
    tp.parallelize_module(model, mesh["node"], PLAN)
    for name in ("width", "heads"):  # of the part that a rank's attention has
        names[name] //= NODE
    if ranks > NODE:
        shard(model, mesh["nodes"])
    with Collectives() as collectives, tp.loss_parallel():
        trained(model, samples=NODE)
    return collectives.calls


WHOLE = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {
    "blocks": tp.PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    ),
    "blocks.*.norm1": tp.SequenceParallel(),
    "blocks.*.attention": WHOLE,
    "blocks.*.attention.qkv": tp.ColwiseParallel(),
    "blocks.*.attention.out": tp.RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.norm2": tp.SequenceParallel(),
    "blocks.*.mlp": WHOLE,
    "blocks.*.mlp.0": tp.ColwiseParallel(),
    "blocks.*.mlp.2": tp.RowwiseParallel(output_layouts=Shard(1)),
    "norm": tp.SequenceParallel(),
    "head": tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
WAYS = {"DDP": ddp, "FSDP2": fsdp2, "2-D": two_dimensional}


def counted():
    """Return what each way calls in a step, {way: {ranks: calls}}."""
    found = {way: {} for way in WAYS}
    for ranks in WORLDS:
        for way, step in WAYS.items():
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            found[way][ranks] = step(ranks)
            dist.destroy_process_group()
    return found


def summed(calls, what):
    """Return the collectives of parameters or activations in words, with their sizes."""
    found = []
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        sizes = [size for of, name, size in calls if (of, name) == (what, kind)]
        if sizes:
            found.append(f"{len(sizes)} {kind}{'s' * (len(sizes) > 1)}, {sum(sizes) / 1e6:.1f} MB")
    return "; ".join(found)


def sent(way, ranks, calls):
    """Return how many bytes a rank sends around rings."""
    among = {"parameters": ranks // NODE if way == "2-D" else ranks, "activations": NODE}
    times = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
    return sum(times[kind] * size * ring(among[what]) for what, kind, size in calls)


def rows(found):
    yield "method", "ranks", "parameters and gradients", "activations", "a rank sends"
    for way, by_ranks in found.items():
        for ranks, calls in by_ranks.items():
            each = (summed(calls, what) for what in ("parameters", "activations"))
            yield way, f"{ranks:,}", *each, f"{sent(way, ranks, calls) / 1e6:.1f} MB"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(table(*rows(counted())))
