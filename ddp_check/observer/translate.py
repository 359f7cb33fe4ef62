"""Lets a script that was written for GPUs run on a CPU: translates its calls, and reports which."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.data import dataloader

from ddp_check.observer.report import TASK, called_by_script, say, watch, where

CPU = torch.device("cpu")
said = set()


def translated(call):
    """Report a call of the script, once for each of its lines."""
    line = where()
    if line and (call, line) not in said:
        said.add((call, line))
        say("translated", call=call, where=line)


def is_gpu(value):
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class OnTheCPU(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of each call of a PyTorch function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            translated(".cuda()")
            return args[0]
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.to, torch._C._nn._parse_to):  # a number is that of a GPU
            place = 1 if func is Tensor.to else 0
            if len(args) > place and type(args[place]) is int:
                translated(f".to({args[place]})")
                args = (*args[:place], CPU, *args[place + 1 :])
        if func is not torch.device:
            gpus = [value for value in (*args, *kwargs.values()) if is_gpu(value)]
            if gpus:
                translated(f'"{gpus[0]}"')
                args = tuple(CPU if is_gpu(value) else value for value in args)
                kwargs = {name: CPU if is_gpu(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def answer(owner, name, value):
    """Let a function that asks about GPUs, or changes one, return this value."""

    def call(*args, **kwargs):
        if called_by_script():
            translated(f"{owner.__name__}.{name}()")
        return value

    setattr(owner, name, call)


COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", TASK.nproc))
for name, value in {
    "is_available": True,
    "device_count": COUNT,
    "current_device": 0,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "manual_seed": None,  # torch.manual_seed seeds the CPU
    "manual_seed_all": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "get_device_name": "CPU",
    "is_bf16_supported": True,
}.items():
    answer(torch.cuda, name, value)
if hasattr(torch, "accelerator"):
    for name, value in {
        "is_available": True,
        "device_count": COUNT,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "set_device_index": None,
        "set_device_idx": None,
        "synchronize": None,
    }.items():
        answer(torch.accelerator, name, value)


@watch(c10d, "init_process_group")
def init_process_group(do, backend=None, *args, device_id=None, **kwargs):
    if "nccl" in str(backend) or device_id is not None:
        translated(f'"{backend}"')
        backend = "gloo"
    return do(backend, *args, **kwargs)


dist.init_process_group = c10d.init_process_group


@watch(DDP, "__init__")
def wrap(do, self, module, device_ids=None, output_device=None, *args, **kwargs):
    if device_ids is not None:
        translated("device_ids")
    return do(self, module, None, None, *args, **kwargs)


@watch(dataloader.DataLoader, "__init__")
def load_data(do, self, *args, pin_memory=False, pin_memory_device="", **kwargs):
    if pin_memory:
        translated("pin_memory")
    return do(self, *args, **kwargs)


@watch(torch, "load")
def load(do, f, map_location=None, *args, **kwargs):
    if map_location is not None and map_location not in ("cpu", CPU):
        translated("map_location")
    return do(f, "cpu", *args, **kwargs)


@watch(torch.amp.GradScaler, "__init__")
def scaler(do, self, device="cuda", *args, **kwargs):
    translated("GradScaler")
    return do(self, "cpu", *args, **kwargs)


@watch(torch.autocast, "__init__")
def autocast(do, self, device_type, *args, **kwargs):
    if device_type == "cuda":
        translated('autocast("cuda")')
    return do(self, "cpu", *args, **kwargs)


OnTheCPU().__enter__()
