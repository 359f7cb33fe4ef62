"""Checksums of tensors, batches and data sets, and what is known of a tensor's values.

checksum          of all bits of some tensors; `checksums`: of each of these
batch_checksum    of some elements of all tensors in a batch, which costs little
describe_samples  of each sample of a batch
fingerprint       of a data set, whatever it consists of
"""

import itertools
import zlib

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_check.observer.base import ask

PER_SAMPLE = 1 << 10  # elements that enter the checksum of a sample
PER_BATCH = 1 << 16  # likewise, of a batch
MAX_PARTS = 30  # first items of a list or attributes of an object that enter its fingerprint
SHORTER = (torch.FloatTensor, torch.BFloat16Tensor, torch.HalfTensor)  # than float64
MAX_BYTES = 1e8  # a larger array does not enter a fingerprint


def local_part(tensor):
    """Return the values that a tensor holds: of a sharded one, only this rank's part."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.coalesce().values() if local.is_sparse else local


def bits(tensor, step=1):
    """Return the bits of each `step`th element of a tensor, in an array of bytes."""
    flat = local_part(tensor).flatten()[::step].cpu().contiguous()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def checksum(tensors, step=1):
    """Return a checksum of the bits of these tensors, of which each `step`th element counts."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(ask(bits, tensor, step, default=b""), total)
    return total


def checksums(named):
    """Return {name: checksum} of {name: tensor}."""
    return {name: checksum([tensor]) for name, tensor in named.items()}


def quick_checksums(named):
    """Return a checksum of each tensor; of a large one, its sum and some of its elements count."""
    sums = {}
    for name, value in named.items():
        step = 1 + value.numel() // PER_BATCH if value is not None else 1
        total = [local_part(value).sum()] if step > 1 else []
        sums[name] = checksum([value, *total], step)
    return sums


def tensors_in(values):
    """Return the tensors in a structure of lists and dictionaries."""
    leaves = ask(tree_leaves, values, default=[])
    return [leaf for leaf in leaves if ask(isinstance, leaf, torch.Tensor)]


def in_double_precision(values):
    """Return a structure with its tensors of fewer bits in float64, for the drill world-size."""
    return tree_map_only(SHORTER, torch.Tensor.double, values)


def batch_checksum(batch):
    """Return a checksum of some of the elements of all tensors in a batch."""
    tensors = tensors_in(batch)
    largest = max((tensor.numel() for tensor in tensors), default=0)
    return checksum(tensors, 1 + largest // PER_BATCH)


def describe_samples(batch):
    """Return what a `Batch` event says about its samples, each a row in some of its tensors."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    count = len(tensors[0]) if tensors else 0
    parts = [
        tensor.detach().cpu().reshape(count, -1)
        for tensor in tensors
        if len(tensor) == count and tensor.numel()
    ]
    parts.sort(key=lambda part: part.shape[1])
    totals = [0] * count
    rows = []  # of checksums, with one more part in each
    for part in parts:
        elements = part[:, :: 1 + part.shape[1] // PER_SAMPLE].contiguous()
        bits_of_rows = elements.view(torch.uint8).numpy()
        totals = [zlib.crc32(row, total) for row, total in zip(bits_of_rows, totals)]
        rows.append(totals)
    return {
        "checksums": rows[-1] if rows else None,
        "label_checksums": rows[0] if len(rows) > 1 else None,
        "width": sum(part.shape[1] for part in parts),
        "label_size": parts[0].shape[1] if parts else None,
    }


def fingerprint(value, depth=5):
    """Return a checksum that is the same for equal data sets, whatever they consist of."""
    return ask(_fingerprint, value, depth, default=0)


def _fingerprint(value, depth):
    if isinstance(value, torch.Tensor):
        return checksum([value])
    if isinstance(value, str | bytes | int | float):
        return zlib.crc32(repr(value).encode())
    content = array_bytes(value)
    if content is not None:
        return zlib.crc32(content)
    parts = parts_of(value) if depth else ()
    return zlib.crc32(repr([fingerprint(part, depth - 1) for part in parts]).encode())


def array_bytes(value):
    """Return the bytes of an array or an image, or None of anything else and of large ones."""
    size = ask(lambda: value.nbytes)
    if size is None:  # of a PIL image, in pixels
        size = ask(lambda: value.width * value.height * len(value.getbands()))
    small = ask(lambda: size < MAX_BYTES)
    return ask(lambda: bytes(value.tobytes())) if small else None


def parts_of(value):
    """Return the first items of a list, or attributes of an object."""
    if isinstance(value, list | tuple):
        return value[:MAX_PARTS]
    attributes = ask(getattr, value, "__dict__", default={})
    return ask(lambda: [*itertools.islice(attributes.values(), MAX_PARTS)], default=[])


def is_finite(value):
    """Return whether all values of a tensor are finite."""
    return ask(_is_finite, local_part(value), default=True)


def _is_finite(value):
    # A sum is several times as fast. It may overflow, and is finite only if all elements are.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def mesh_dimensions(values):
    """Return the number of dimensions of the mesh that the values are sharded over, or 0."""
    flat = any(hasattr(value, "_fsdp_flattened") for value in values)
    meshes = [value.device_mesh.ndim for value in values if hasattr(value, "device_mesh")]
    return max([int(flat), *meshes])
