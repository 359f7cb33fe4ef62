"""Checksums of tensors, batches and data sets, and what is known of a tensor's values."""

import itertools
import zlib

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_check.observer.base import ask

MAX_PER_SAMPLE = 1 << 10  # elements that enter the checksum of a sample
MAX_QUICK = 1 << 16  # elements of a tensor that enter a quick checksum
MAX_PARTS = 30  # first items of a list or attributes of an object that enter its fingerprint
MAX_BYTES = 1e8  # a larger array does not enter a fingerprint
# The fields of `Batch` that tell of samples, of a batch in which none has a row of its own:
UNKNOWN_SAMPLES = {"checksums": None, "label_checksums": None}
# Types for isinstance: a tensor in float32 on the CPU is a torch.FloatTensor.
LOWER_PRECISION = (torch.FloatTensor, torch.BFloat16Tensor, torch.HalfTensor)


def tensors_in(values):
    """Return the tensors in a structure of lists and dictionaries."""
    leaves = ask(tree_leaves, values, default=[])
    return [leaf for leaf in leaves if ask(isinstance, leaf, torch.Tensor)]


def in_double_precision(values):
    """Return a structure with its tensors in float64, for the drill world-size."""
    return tree_map_only(LOWER_PRECISION, torch.Tensor.double, values)


def local_part(tensor):
    """Return the values that a tensor holds: of a sharded one, those that this rank holds."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.coalesce().values() if local.is_sparse else local


def mesh_dimensions(tensors):
    """Return the number of dimensions of the mesh that tensors are sharded over, or 0.

    It is 1 for FSDP and for HSDP, which replicates over a second dimension, and 2 for FSDP with
    tensor parallelism. For tensors that are only replicated over a mesh, it is 1, too.
    """
    flat = any(hasattr(tensor, "_fsdp_flattened") for tensor in tensors)  # FSDP1 marks them so
    meshes = [
        max(1, sum(not placement.is_replicate() for placement in tensor.placements))
        for tensor in tensors
        if hasattr(tensor, "placements")
    ]
    return max([int(flat), *meshes])


def is_finite(tensor):
    """Return whether all values of a tensor are finite."""
    local = local_part(tensor)
    # A sum is several times as fast. It may overflow, and is finite only if all elements are.
    return bool(local.sum().isfinite()) or bool(local.isfinite().all())


def checksum(tensors, quick=False):
    """Return a checksum of the bits of these tensors.

    For a quick one, the sum of a large tensor and some of its elements count. What cannot be read,
    such as None, is left out; if nothing is left, it is 0.
    """
    total = 0
    for tensor in tensors:
        for content in ask(bits, tensor, quick, default=()):
            total = zlib.crc32(content, total)
    return total


def bits(tensor, quick):
    """Return the bits of a tensor that enter its checksum, as arrays of bytes."""
    values = local_part(tensor).flatten()
    parts = [values]
    if quick and len(values) > MAX_QUICK:
        parts = [values[:: 1 + len(values) // MAX_QUICK], values.sum().reshape(1)]
    return [part.cpu().contiguous().view(torch.uint8).numpy() for part in parts]


def checksums(named, quick=False):
    """Return {name: checksum} of {name: tensor}."""
    return {name: checksum([tensor], quick) for name, tensor in named.items()}


# ---------------------------------------------------------------- samples and data sets


def describe_samples(batch, count):
    """Return the fields of a `Batch` event that tell of its samples.

    A sample has a row in each tensor that is as long as there are samples: its label is in the one
    with the shortest rows. Of 8 images and 8 labels, there are 8 checksums and 8 label_checksums.
    If the count is 1, as where the data set returns whole batches, all tensors are that sample's.
    None stands for the length of the first tensor.
    """
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and tensor.numel()]
    if count is None:
        count = len(tensors[0]) if tensors else 0
    parts = [
        tensor.detach().cpu().reshape(count, -1)
        for tensor in tensors
        if count == 1 or len(tensor) == count
    ]
    parts.sort(key=lambda part: part.shape[1])
    if not parts:
        return UNKNOWN_SAMPLES
    label, *others = parts
    label_checksums = continued([0] * count, label)
    checksums = label_checksums
    for part in others:
        checksums = continued(checksums, part)
    return {
        "checksums": checksums,
        "label_checksums": label_checksums if others else None,
    }


def continued(checksums, part):
    """Return the checksums of samples, continued by the row that each has in a further tensor."""
    elements = part[:, :: 1 + part.shape[1] // MAX_PER_SAMPLE].contiguous()
    rows = elements.view(torch.uint8).numpy()
    return [zlib.crc32(row, checksum) for row, checksum in zip(rows, checksums)]


def fingerprint(value, depth=5):
    """Return a checksum that is the same for equal data sets, whatever they consist of.

    Others may share it, for only the first parts of each part enter it.
    """
    if isinstance(value, torch.Tensor):
        return checksum([value], quick=True)
    if isinstance(value, str | bytes | int | float):
        return zlib.crc32(repr(value).encode())
    content = array_bytes(value)
    if content is not None:
        return zlib.crc32(content)
    parts = parts_of(value) if depth else ()
    fingerprints = [ask(fingerprint, part, depth - 1, default=0) for part in parts]
    return zlib.crc32(repr(fingerprints).encode())


def array_bytes(value):
    """Return the bytes of an array or an image, or None of anything else and of large ones."""
    size = ask(lambda: value.nbytes)
    if size is None:  # no array, perhaps a PIL image
        size = ask(lambda: value.width * value.height * len(value.getbands()))
    return ask(lambda: bytes(value.tobytes()) if size < MAX_BYTES else None)


def parts_of(value):
    """Return the first items of a list or values of a dictionary, or attributes of an object."""
    if isinstance(value, list | tuple):
        return value[:MAX_PARTS]
    named = value if isinstance(value, dict) else ask(getattr, value, "__dict__", default={})
    return ask(lambda: [*itertools.islice(named.values(), MAX_PARTS)], default=[])
