"""The environment of a stand-in for CUDA, which runs the scripts' GPU branches on a CPU."""

from pathlib import Path

SHIM = {
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PYTHONPATH": str(Path(__file__).with_name("gpu_shim")),
    "GPU_SHIM_RECORD": ".calls",  # in the working directory of the script
}
