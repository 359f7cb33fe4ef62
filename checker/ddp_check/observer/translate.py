"""Runs a script that was written for GPUs on the CPU: translates its calls and reports them."""

import contextlib
import functools
import inspect
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn import BatchNorm2d, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ddp_check.events import Gpu, Translated
from ddp_check.observer.report import TASK, called_by_script, say, seen, watch, where

CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the checker sets it to an empty string, the script may change it
COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", TASK.nproc))
ANSWERED = {Tensor.get_device: ".get_device()", Tensor.is_cuda.__get__: ".is_cuda"}
said = set()
current = {"index": 0}  # of the GPU that "cuda" means


def translated(call):
    """Report a translated call, once per line of the script."""
    line = where()
    if line and (call, line) not in said:
        said.add((call, line))
        say(Translated, line, call=call)


def is_gpu(value):
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def use(device, kind="use"):
    """Report the GPU that the script names: a device, a number, or None for the current one."""
    line, index = where(), device
    if not isinstance(device, int | None):
        index = torch.device(device).index
    index = current["index"] if index is None else index
    if line and (kind, index) not in said:
        said.add((kind, index))
        chosen = bool(os.environ.get(VISIBLE))
        say(Gpu, line, use=kind, index=index, count=COUNT, chosen=chosen)
    return index


def set_device(device, *_):
    index = use(0 if device is None else device, "set")
    current["index"] = index if index >= 0 else current["index"]  # PyTorch ignores others


class OnTheCPU(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of every PyTorch call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in (Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        if func in ANSWERED and called_by_script():
            translated(ANSWERED[func])
            return use(None) if func is Tensor.get_device else True
        if func is Tensor.cuda:
            translated(".cuda()")
            use(args[1] if len(args) > 1 else kwargs.get("device"))
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

    def elapsed_time(self, _):
        return 1.0

    def __getattr__(self, name):  # what it waits for has happened, what it asks for is true
        return lambda *_: self


class AnyGenerator(type):
    """Makes generators for the CPU; each generator is an instance of its class."""

    def __call__(cls, device=CPU):
        if isinstance(device, int) or is_gpu(device):
            translated("torch.Generator(device)")
        return RealGenerator(CPU)

    def __instancecheck__(cls, value):
        return isinstance(value, RealGenerator)


RealGenerator = torch.Generator
torch.Generator = AnyGenerator("Generator", (), {})
for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "device"):
    setattr(torch.cuda, name, Idle)
torch.cuda.nvtx = torch.cuda.profiler = Idle.__new__(Idle)
for name in [name for name in dir(torch.cuda) if name.endswith("Tensor")]:
    setattr(torch.cuda, name, getattr(torch, name))
ANSWERS = {  # every other function answers 0
    "is_available": True,
    "is_initialized": True,
    "device_count": COUNT,
    "get_device_name": "CPU",
    "get_device_capability": (8, 0),
    "get_device_properties": SimpleNamespace(name="CPU", total_memory=1 << 30, major=8, minor=0),
    "is_bf16_supported": True,
    "current_accelerator": torch.device("cuda"),
    "mem_get_info": (1 << 30, 1 << 30),
    "memory_stats": {},
}
ANSWERS |= dict.fromkeys(("current_device", "current_device_index"), lambda: current["index"])
SET = dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), set_device)
# What libraries may also call; torch.manual_seed seeds the CPU.
QUIET = ("init", "synchronize", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all")
for owner in (torch.cuda, torch.accelerator):
    for name, do in inspect.getmembers(owner, inspect.isfunction):
        if do.__module__.startswith(owner.__name__) and not name.startswith("_"):
            replace(owner, name, (ANSWERS | SET).get(name, 0), name in SET or name in QUIET)


def replace_arguments(owner, function, **changes):
    """Call a function with these arguments, and report those that they replace."""

    @watch(owner, function)
    def on_the_cpu(do, *args, **kwargs):
        signature = inspect.signature(do)
        call = signature.bind(*args, **kwargs)
        for name, value in changes.items():
            given = call.arguments.get(name, signature.parameters[name].default)
            call.arguments[name] = value
            if given and given not in (value, "cpu", CPU):
                translated(f'"{given}"' if isinstance(given, str) else name)
                if value is None:  # it names the GPUs that it is to use
                    for device in given if isinstance(given, list | tuple) else [given]:
                        use(device)
        return do(*call.args, **call.kwargs)


replace_arguments(DDP, "__init__", device_ids=None, output_device=None)
replace_arguments(DataLoader, "__init__", pin_memory=False, pin_memory_device="")
replace_arguments(torch, "load", map_location="cpu")
replace_arguments(torch.amp.GradScaler, "__init__", device="cpu")
replace_arguments(torch.autocast, "__init__", device_type="cpu")
replace_arguments(c10d, "init_process_group", backend="gloo", device_id=None)


@watch(c10d, "init_process_group")
def init_process_group(do, *args, **kwargs):
    if not called_by_script():  # on GPUs, a framework calls set_device before
        current["index"] = int(os.environ.get("LOCAL_RANK", 0))
    return do(*args, **kwargs)


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
    """Normalize this rank's samples together with those of the others, as one batch."""
    translated("SyncBatchNorm")
    if not (self.training and dist.is_initialized()):
        return BatchNorm2d.forward(self, tensor)
    rank, group = dist.get_rank(self.process_group), self.process_group
    each = torch.eye(dist.get_world_size(group))[rank] * len(tensor)
    each = Sum.apply(each, group).int().tolist()
    before, after = sum(each[:rank]), sum(each[rank + 1 :])
    padding = [0, 0] * (tensor.dim() - 1) + [before, after]
    whole = Sum.apply(torch.nn.functional.pad(tensor, padding), group)
    return BatchNorm2d.forward(self, whole)[before : before + len(tensor)]


OnTheCPU().__enter__()
