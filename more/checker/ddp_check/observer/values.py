"""Checksums of tensors, batches and data sets, and questions about a tensor's values."""

import itertools
import zlib

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_check.observer.base import ask

MAX_PER_SAMPLE = 1 << 10  # number of elements of a sample in one tensor that enter its checksum
MAX_QUICK = 1 << 16  # number of a tensor's elements that enter a quick checksum
MAX_PARTS = 30  # number of a list's items or an object's attributes that enter a fingerprint
MAX_BYTES = 1e8  # a larger array does not enter a fingerprint
# The fields of `Batch` about samples, for a batch in which the samples have no rows:
UNKNOWN_SAMPLES = {"checksums": None, "label_checksums": None}
# Types for isinstance: a float32 tensor on the CPU is a torch.FloatTensor.
LOWER_PRECISION = (torch.FloatTensor, torch.BFloat16Tensor, torch.HalfTensor)


def tensors_in(values):
    """Return the tensors in a structure of lists and dictionaries."""
    leaves = ask(tree_leaves, values, default=[])
    return [leaf for leaf in leaves if ask(isinstance, leaf, torch.Tensor)]


def in_double_precision(values):
    """Return a structure with its tensors in float64, for the drill world-size."""
    return tree_map_only(LOWER_PRECISION, torch.Tensor.double, values)


def local_part(tensor):
    """Return the values of a tensor; if it is sharded, only those that this rank holds."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.coalesce().values() if local.is_sparse else local


def mesh_dimensions(tensors):
    """Return over how many dimensions of a mesh the tensors are sharded, or 0 without a mesh.

    This is 1 for FSDP and for HSDP, which replicates over a second dimension, and 2 for FSDP with
    tensor parallelism. It is also 1 for tensors that are only replicated over a mesh, because DDP
    does not reduce their gradients.
    """
    flat = any(hasattr(tensor, "_fsdp_flattened") for tensor in tensors)  # set by FSDP1
    meshes = [
        max(1, sum(not placement.is_replicate() for placement in tensor.placements))
        for tensor in tensors
        if hasattr(tensor, "placements")
    ]
    return max([int(flat), *meshes])


def is_finite(tensor):
    """Return whether all values of a tensor are finite."""
    local = local_part(tensor)
    # Checking the sum is faster. It is finite only if all elements are, but it may overflow.
    return bool(local.sum().isfinite()) or bool(local.isfinite().all())


def checksum(tensors, quick=False):
    """Return a checksum of the bits of these tensors.

    A quick checksum uses only the sum and some elements of a large tensor. Values that cannot be
    read, such as None, are left out; if nothing is left, the checksum is 0.
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
    """Return {name: checksum} for {name: tensor}."""
    return {name: checksum([tensor], quick) for name, tensor in named.items()}


# ---------------------------------------------------------------- samples and data sets


def describe_samples(batch, count):
    """Return the fields of a `Batch` event about its samples.

    A sample has a row in each tensor whose length is the number of samples. The tensor with the
    shortest rows has the labels. If `count` is 1, as in a data set of whole batches, all tensors
    belong to that sample. If it is None, the length of the first tensor is the number of samples.
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
    checksums = label_checksums = continued([0] * count, label)
    for part in others:
        checksums = continued(checksums, part)
    return {"checksums": checksums, "label_checksums": label_checksums if others else None}


def continued(checksums, part):
    """Return the samples' checksums after adding the row of each sample in one more tensor."""
    elements = part[:, :: 1 + part.shape[1] // MAX_PER_SAMPLE].contiguous()
    rows = elements.view(torch.uint8).numpy()
    return [zlib.crc32(row, checksum) for row, checksum in zip(rows, checksums)]


def fingerprint(value, depth=5):
    """Return a checksum that is the same for equal data sets, whatever they consist of.

    Different data sets may have the same one, because only the first parts of each part enter it.
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
    """Return the bytes of an array or an image, or None for other objects and for large ones."""
    size = ask(lambda: value.nbytes)
    if size is None:  # it is no array, but it may be a PIL image
        size = ask(lambda: value.width * value.height * len(value.getbands()))
    return ask(lambda: bytes(value.tobytes()) if size < MAX_BYTES else None)


def parts_of(value):
    """Return the first items of a list, values of a dictionary or attributes of an object."""
    if isinstance(value, list | tuple):
        return value[:MAX_PARTS]
    named = value if isinstance(value, dict) else ask(getattr, value, "__dict__", default={})
    return ask(lambda: [*itertools.islice(named.values(), MAX_PARTS)], default=[])
