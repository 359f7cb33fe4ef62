"""The GPUs of this machine, which tests use with `pytest --gpus`."""

import os
from pathlib import Path

VARIABLE = "DDP_LADDER_GPUS"  # environment variable with the number of GPUs; set only with --gpus

# Bit-for-bit identical weights on GPUs need deterministic algorithms, cuBLAS workspaces of a fixed
# size, float32 that is not rounded to TF32, and NCCL without NVLink SHARP, whose order of additions
# varies.
SAME_BITS = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "deterministic"),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def count():
    """Return the number of GPUs that the tests use."""
    return int(os.environ.get(VARIABLE, 0))


def environment():
    """Return the environment variables with which tests start a program, with or without GPUs."""
    return SAME_BITS if count() else {"CUDA_VISIBLE_DEVICES": ""}


def shared(nprocs):
    """Return whether this many ranks have to share GPUs. Each rank then uses the first GPU."""
    return 0 < count() < nprocs
