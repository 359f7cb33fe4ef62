"""Pretends to have the GPUs that CUDA_VISIBLE_DEVICES names, and records how a script uses them.

Tensors on "cuda" are kept on the CPU, and gloo stands in for NCCL. What would fail on a GPU fails
here, too: mixing tensors of two devices, a CPU tensor in a group without a backend for it, a GPU
that does not exist. Each process lists its distinct calls in its own file in the folder
GPU_SHIM_RECORD, in the order of their first use.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

VISIBLE = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
GPUS = len(VISIBLE)
RECORD = Path(os.environ["GPU_SHIM_RECORD"])
CPU = torch.device("cpu")
MIX_DEVICES = {Tensor.copy_, Tensor.data.__set__, torch._has_compatible_shallow_copy_type}
calls = []
current = 0  # the GPU that "cuda" means
backends = {}  # of the process group: device type -> backend


def record(*call):
    if call not in calls:
        calls.append(call)
        RECORD.mkdir(parents=True, exist_ok=True)
        (RECORD / str(os.getpid())).write_text(json.dumps(calls, default=str), encoding="utf-8")


# ---------------------------------------------------------------- devices


def set_device(device):
    global current  # noqa: PLW0603
    index = device if isinstance(device, int) else torch.device(device).index
    if index >= GPUS:  # the beginning of PyTorch's message
        raise torch.AcceleratorError(
            "CUDA error: invalid device ordinal\n"
            "GPU device may be out of range, do you have enough GPUs?\n"
        )
    record("set_device", index, VISIBLE[index])
    current = index


def device_of(tensor):
    return vars(tensor.untyped_storage()).get("gpu", CPU)


def tensors_in(values):
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def named_device(value):
    """Return the device that an argument names, or None."""
    if isinstance(value, str) and value.startswith(("cuda", "cpu")):
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
        return torch.device("cuda", current)
    return value if isinstance(value, torch.device) else None


class FakeGPUs(TorchFunctionMode):
    """Intercepts every call of a PyTorch function before it runs on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return device_of(args[0])
        if func == Tensor.is_cuda.__get__:
            return device_of(args[0]) != CPU
        if func is Tensor.pin_memory:
            record("pin_memory", torch.device("cuda", current))
            return args[0]
        if func in (Tensor.cpu, Tensor.cuda):
            func, args = Tensor.to, (args[0], func.__name__)
        inputs = tensors_in((args, kwargs))
        devices = {device_of(tensor) for tensor in inputs if tensor.dim()}
        target = next(filter(None, map(named_device, (*args, kwargs.get("device")))), None)
        if target:
            args = [CPU if named_device(value) else value for value in args]
            kwargs = {key: CPU if named_device(value) else value for key, value in kwargs.items()}
            if func is Tensor.to and target != device_of(inputs[0]):
                kwargs["copy"] = True
        elif len(devices) > 1 and func not in MIX_DEVICES:
            raise RuntimeError(f"Expected all tensors to be on the same device\n{func}")
        result = func(*args, **kwargs)
        target = target or next((d for d in map(device_of, inputs) if d != CPU), CPU)
        if target != CPU and func not in MIX_DEVICES:
            record("allocate", target)
            for tensor in tensors_in(result):
                tensor.untyped_storage().gpu = target
        return result


torch.cuda.is_available = torch.accelerator.is_available = lambda: True
torch.cuda.device_count = lambda: GPUS
torch.cuda.current_device = lambda: current
torch.cuda.get_device_name = lambda: "a pretended GPU"
torch.cuda.set_device = set_device
torch.accelerator.current_accelerator = lambda check_available=False: None
FakeGPUs().__enter__()


# ---------------------------------------------------------------- collectives

join, wrap = dist.init_process_group, DDP.__init__


def init_process_group(backend, *args, device_id=None, **kwargs):
    rank = kwargs.get("rank", os.environ.get("RANK"))  # step 2 has no local rank
    ranks = int(rank), int(os.environ.get("LOCAL_RANK", rank))
    record("init_process_group", backend, *ranks, device_id)
    backends.update(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map())
    return join("gloo", *args, **kwargs)


def wrap_model(self, module, *args, **kwargs):
    for device in {device_of(tensor).type for tensor in module.state_dict().values()}:
        record("DDP", device)  # its gradients are all-reduced on that device
    return wrap(self, module, *args, **kwargs)


def watched(name, collective):
    def call(*args, **kwargs):
        types = {device_of(tensor).type for tensor in tensors_in((args, kwargs))}
        for device in types or {c10d._get_object_coll_device()}:  # a barrier has no tensor
            record(name, device)
            if device not in backends:
                raise RuntimeError(f"No backend type associated with device type {device}")
        with torch._C.DisableTorchFunction():
            return collective(*args, **kwargs)

    return call


dist.init_process_group = init_process_group
DDP.__init__ = wrap_model
c10d._get_object_coll_device = lambda group=None: "cpu" if "cpu" in backends else "cuda"
for name in ("all_reduce", "all_gather", "gather", "broadcast", "barrier"):
    setattr(c10d, name, watched(name, getattr(c10d, name)))
    setattr(dist, name, getattr(c10d, name))
