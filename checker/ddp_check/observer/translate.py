"""Runs a script that was written for GPUs on the CPU: translates its calls and reports them."""

import contextlib
import functools
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn import BatchNorm2d, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.data import dataloader

from ddp_check.events import Gpu, Translated
from ddp_check.observer.report import TASK, called_by_script, say, seen, watch, where

CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the checker sets it to an empty string, the script may change it
COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", TASK.nproc))
said = set()
current = {"index": 0}  # of the GPU that "cuda" means


def translated(call):
    """Report a translated call, once per line of the script."""
    line = where()
    if line and (call, line) not in said:
        said.add((call, line))
        say(Translated, line, call=call)


def is_gpu(value):
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def index_of(device):
    """Return the index of a GPU, or None for the current one."""
    return device if isinstance(device, int) else torch.device(device).index


def use(device, kind="use"):
    """Report the GPU that the script names: a device, a number, or the current one."""
    line, index = where(), index_of(device)
    index = current["index"] if index is None else index
    if line and (kind, index) not in said:
        said.add((kind, index))
        chosen = bool(os.environ.get(VISIBLE))
        say(Gpu, line, use=kind, index=index, count=COUNT, chosen=chosen)


def set_device(device, *_):
    index = index_of(device) or 0
    current["index"] = index if index >= 0 else current["index"]  # PyTorch ignores others
    use(current["index"], "set")


class OnTheCPU(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of every PyTorch call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in (Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        if func is Tensor.cuda:
            translated(".cuda()")
            device = args[1] if len(args) > 1 else kwargs.get("device")
            use("cuda" if device is None else device)
            return args[0]
        place = {Tensor.to: 1, torch._C._nn._parse_to: 0}.get(func)
        if place is not None and len(args) > place and type(args[place]) is int:  # means a GPU
            translated(f".to({args[place]})")
            use(args[place])
            args = (*args[:place], CPU, *args[place + 1 :])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        for gpu in [value for value in (*args, *kwargs.values()) if is_gpu(value)][:1]:
            translated(f'"{gpu}"')
            use(gpu)
            args = tuple(CPU if is_gpu(value) else value for value in args)
            kwargs = {name: CPU if is_gpu(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def replace(owner, name, value, always):
    """Make a function of PyTorch return a value, or do what the value does, for the script."""
    do = getattr(owner, name)

    @functools.wraps(do)
    def call(*args, **kwargs):
        if called_by_script():
            translated(f"{owner.__name__}.{name}()")
        elif not always:
            return do(*args, **kwargs)
        return value(*args, **kwargs) if callable(value) else value

    setattr(owner, name, call)


class Idle(contextlib.nullcontext):
    """A stream, an event or a context of one: on the CPU, everything has happened already."""

    def __init__(self, *_, **__):
        super().__init__(self)
        translated("a stream or an event")
        self.record()

    def record(self, *_):
        self.at = time.monotonic()

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)

    def __getattr__(self, name):  # what it waits for has happened, what it asks for is true
        return lambda *_: self


class AnyGenerator(type):
    """Makes generators for the CPU; each generator is an instance of its class."""

    def __call__(cls, device="cpu"):
        if isinstance(device, int) or is_gpu(device):
            translated("torch.Generator(device)")
            device = "cpu"
        return RealGenerator(device)

    def __instancecheck__(cls, value):
        return isinstance(value, RealGenerator)


RealGenerator = torch.Generator
torch.Generator = AnyGenerator("Generator", (), {})
for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
    setattr(torch.cuda, name, Idle)
ANSWERS = {
    "is_available": True,
    "device_count": COUNT,
    "get_device_name": "CPU",
    "get_device_capability": (8, 0),
    "is_bf16_supported": True,
    "current_accelerator": torch.device("cuda"),
    "mem_get_info": (1 << 30, 1 << 30),
    "memory_stats": {},
}
ZEROS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
INDEX = ("current_device", "current_device_index", "current_device_idx")
SKIPPED = ("init", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect")
SEEDED = ("manual_seed", "manual_seed_all")  # torch.manual_seed seeds the CPU
SET = ("set_device", "set_device_index", "set_device_idx")
ANSWERS |= dict.fromkeys(ZEROS, 0) | dict.fromkeys(INDEX, lambda *_: current["index"])
CHANGES = dict.fromkeys((*SKIPPED, *SEEDED)) | dict.fromkeys(SET, set_device)  # also for libraries
for owner in (torch.cuda, torch.accelerator):
    for name, value in (ANSWERS | CHANGES).items():
        if hasattr(owner, name):
            replace(owner, name, value, always=name in CHANGES)


@watch(c10d, "init_process_group")
def init_process_group(do, backend=None, *args, device_id=None, **kwargs):
    if "nccl" in str(backend) or device_id is not None:
        translated(f'"{backend}"')
        backend = "gloo"
    if device_id is not None:
        use(device_id)
    if not called_by_script():  # on GPUs, a framework calls set_device before
        current["index"] = int(os.environ.get("LOCAL_RANK", 0))
    return do(backend, *args, **kwargs)


dist.init_process_group = c10d.init_process_group


@watch(DDP, "__init__")
def wrap(do, self, module, device_ids=None, output_device=None, *args, **kwargs):
    if device_ids is not None:
        translated("device_ids")
        for device in device_ids:
            use(device)
    return do(self, module, None, None, *args, **kwargs)


class Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks, whose gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group, total = group, tensor.clone()
        seen.in_collective += 1  # it is not the script's, though PyTorch calls the watched one
        c10d.all_reduce.__wrapped__(total, group=group)
        seen.in_collective -= 1
        return total

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient, ctx.group), None


# DDP refuses SyncBatchNorm on the CPU; `normalize` computes it there.
DDP._passing_sync_batchnorm_handle = lambda self, module: None


@watch(SyncBatchNorm, "forward")
def normalize(do, self, tensor):
    """Normalize by the mean and the variance of the samples of all ranks."""
    translated("SyncBatchNorm")
    if not (self.training and dist.is_initialized()):
        return BatchNorm2d.forward(self, tensor)
    over, shape = [0, *range(2, tensor.dim())], [1, -1, *[1] * (tensor.dim() - 2)]
    wide = tensor.double()
    here = torch.stack([wide.sum(over), wide.square().sum(over), torch.ones_like(wide).sum(over)])
    total, squares, count = Sum.apply(here, self.process_group)
    mean = total / count
    variance = squares / count - mean.square()
    if self.track_running_stats:
        self.num_batches_tracked += 1
        part = self.momentum or 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.detach().to(self.running_mean), part)
        unbiased = (variance * count / (count - 1)).detach()
        self.running_var.lerp_(unbiased.to(self.running_var), part)
    result = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        result = result * self.weight.view(shape) + self.bias.view(shape)
    return result.to(tensor.dtype)


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
