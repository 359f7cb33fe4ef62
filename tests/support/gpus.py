"""Real GPUs, if there are any, and a stand-in for CUDA that runs the GPU branches on a CPU."""

import os

import torch
from support.scripts import ROOT

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# jobs.environment hides the GPUs from the other tests. Besides deterministic algorithms,
# bit-for-bit identical weights on GPUs need the rest: cuBLAS workspaces of a fixed size, float32
# that is not rounded to TF32, and NCCL without NVLink SHARP, whose order of additions varies.
ON_GPUS = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
SHIM = {
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PYTHONPATH": str(ROOT / "tests" / "gpu_shim"),
    "GPU_SHIM_RECORD": ".calls",  # in the working directory of the script
}
