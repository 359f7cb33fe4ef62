"""Checksums of tensors, batches and data sets, and what is known of a tensor's values."""

import contextlib
import itertools
import zlib

import torch
from torch.utils._pytree import tree_leaves

ELEMENTS = 1 << 10  # of a sample that enter its checksum
SAMPLE = 1 << 16  # elements of a batch that enter its checksum


def local_part(tensor):
    """Return the values that a tensor holds: of a sharded one, only this rank's part."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.coalesce().values() if local.is_sparse else local


def checksum(tensors, step=1):
    """Return a checksum of the bits of these tensors, of which each `step`th element counts."""
    total = 0
    for tensor in tensors:
        with contextlib.suppress(Exception):  # an exotic tensor must not crash the user's script
            flat = local_part(tensor).flatten()[::step].cpu().contiguous()
            total = zlib.crc32(flat.view(torch.uint8).numpy(), total) if flat.numel() else total
    return total


def checksums(named):
    return {name: checksum([tensor]) for name, tensor in named.items()}


def batch_checksum(batch):
    tensors = tensors_in(batch)
    return checksum(tensors, 1 + max((one.numel() for one in tensors), default=0) // SAMPLE)


def tensors_in(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def sample_checksums(batch):
    """Return checksums of each sample in a batch, and of its smallest part, or None without one."""
    tensors = [one for one in tensors_in(batch) if one.dim()]
    count = len(tensors[0]) if tensors else 0
    parts = [one.reshape(count, -1) for one in tensors if len(one) == count and one.numel()]
    parts.sort(key=lambda one: one.shape[1])
    rows, labels = [0] * count, None
    for part in parts:
        some = part.detach().cpu()[:, :: 1 + part.shape[1] // ELEMENTS].contiguous()
        rows = [zlib.crc32(row, total) for row, total in zip(some.view(torch.uint8).numpy(), rows)]
        labels = labels or rows
    return rows or None, labels if len(parts) > 1 else None


def fingerprint(value, depth=5):
    """Return a checksum that is the same for equal data sets."""
    if isinstance(value, torch.Tensor):
        return checksum([value])
    if isinstance(value, str | bytes | int | float):
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "tobytes") and value.nbytes < 1e8:
        return zlib.crc32(value.tobytes())
    parts = parts_of(value) if depth else ()
    return zlib.crc32(repr([fingerprint(part, depth - 1) for part in parts]).encode())


def parts_of(value):
    """Return the first items of a list, or attributes of an object."""
    parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return [*itertools.islice(parts, 30)]


def is_finite(value):
    return bool(local_part(value).isfinite().all())


def meshes(values):
    """Return the number of dimensions of the mesh that the values are sharded over, or 0."""
    flat = any(hasattr(v, "_fsdp_flattened") for v in values)
    return max([int(flat), *(v.device_mesh.ndim for v in values if hasattr(v, "device_mesh"))])
