"""This machine's GPUs, which `jobs.environment` hides from tests that do not ask for them."""

import os

import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# Besides deterministic algorithms, bit-for-bit identical weights on GPUs need the rest: cuBLAS
# workspaces of a fixed size, float32 that is not rounded to TF32, and NCCL without NVLink SHARP,
# whose order of additions varies.
ON_GPUS = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
