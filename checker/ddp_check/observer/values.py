"""Checksums of tensors, batches and data sets, and what is known of a tensor's values."""

import itertools
import zlib

import torch
from torch.utils._pytree import tree_leaves

from ddp_check.observer.base import ask

ELEMENTS = 1 << 10  # of a sample that enter its checksum
SAMPLE = 1 << 16  # elements of a batch that enter its checksum
PARTS = 30  # first items of a list or attributes of an object that enter its fingerprint
BYTES = 1e8  # a larger array does not enter a fingerprint


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
    return {name: checksum([tensor]) for name, tensor in named.items()}


def tensors_in(values):
    leaves = ask(tree_leaves, values, default=[])
    return [leaf for leaf in leaves if ask(isinstance, leaf, torch.Tensor)]


def batch_checksum(batch):
    """Return a checksum of some of the elements of all tensors in a batch."""
    tensors = tensors_in(batch)
    largest = max((tensor.numel() for tensor in tensors), default=0)
    return checksum(tensors, 1 + largest // SAMPLE)


class Samples:
    """The samples of a batch, each of which is a row in some of its tensors."""

    def __init__(self, batch):
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
        count = len(tensors[0]) if tensors else 0
        self.parts = [
            tensor.detach().cpu().reshape(count, -1)
            for tensor in tensors
            if len(tensor) == count and tensor.numel()
        ]
        self.parts.sort(key=lambda part: part.shape[1])
        self.width = sum(part.shape[1] for part in self.parts)  # elements of a sample
        totals = [0] * count
        rows = []  # of checksums, with one more part in each
        for part in self.parts:
            elements = part[:, :: 1 + part.shape[1] // ELEMENTS].contiguous()
            bits_of_rows = elements.view(torch.uint8).numpy()
            totals = [zlib.crc32(row, total) for row, total in zip(bits_of_rows, totals)]
            rows.append(totals)
        self.checksums = rows[-1] if rows else None  # of each sample
        self.labels = rows[0] if len(rows) > 1 else None  # of the smallest part of each


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
    small = ask(lambda: size < BYTES)
    return ask(lambda: bytes(value.tobytes())) if small else None


def parts_of(value):
    """Return the first items of a list, or attributes of an object."""
    if isinstance(value, list | tuple):
        return value[:PARTS]
    attributes = ask(getattr, value, "__dict__", default={})
    return ask(lambda: [*itertools.islice(attributes.values(), PARTS)], default=[])


def is_finite(value):
    return ask(lambda: bool(local_part(value).isfinite().all()), default=True)


def mesh_dimensions(values):
    """Return the number of dimensions of the mesh that the values are sharded over, or 0."""
    flat = any(hasattr(value, "_fsdp_flattened") for value in values)
    meshes = [value.device_mesh.ndim for value in values if hasattr(value, "device_mesh")]
    return max([int(flat), *meshes])
