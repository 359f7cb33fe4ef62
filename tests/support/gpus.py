"""The GPUs of this machine, which tests use with `pytest --gpus`."""

import os
from pathlib import Path

VARIABLE = "DDP_LADDER_GPUS"  # how many there are; only set with --gpus
HERE = Path(__file__).resolve().parent
SHARE = HERE.parents[1] / "without_slurm" / "share_gpu.sh"  # starts a rank on the first GPU

# Bit-for-bit identical weights on GPUs need deterministic algorithms, cuBLAS workspaces of a fixed
# size, float32 that is not rounded to TF32, and NCCL without NVLink SHARP, whose order of additions
# varies.
SAME_BITS = {
    "PYTHONPATH": str(HERE / "deterministic"),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # After a timeout, the watchdog gives all ranks four times as long to write down what they did.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}


def count():
    """Return how many GPUs the tests use."""
    return int(os.environ.get(VARIABLE, 0))


def environment():
    """Return the variables with which tests start a program, on GPUs or not."""
    return SAME_BITS if count() else {"CUDA_VISIBLE_DEVICES": ""}


def shared(nprocs):
    """Return whether so many ranks share GPUs; each then takes the first."""
    return 0 < count() < nprocs
