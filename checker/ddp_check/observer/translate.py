"""Runs a script that was written for GPUs on the CPU: translates its calls and reports them."""

import contextlib
import inspect
import os
import re
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import BatchNorm2d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ddp_check.events import Gpu, Translated
from ddp_check.observer.base import TASK, is_first, report, script_line, state
from ddp_check.observer.patches import C10D, DDP, patch, replace

CPU = torch.device("cpu")
COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", TASK.nproc))
ANSWERED = {Tensor.get_device: ".get_device()", Tensor.is_cuda.__get__: ".is_cuda"}
NUMBERED = {Tensor.to: 1, torch._C._nn._parse_to: 0}  # place of what may be a GPU's number


def translated(call):
    """Report a translated call, once per line of the script."""
    line = script_line()
    if line and is_first(call, line):
        report(Translated, line, call=call)


def is_gpu(value):
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def use(device, kind="use"):
    """Report the GPU that the script names: a device, a number, or None for the current one."""
    if str(device).startswith("cpu"):
        return -1
    line = script_line()
    index = device if isinstance(device, int | None) else torch.device(device).index
    index = state.gpu if index is None else index
    if line and is_first(kind, index):
        visible_chosen = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))  # the checker sets it to ""
        report(Gpu, line, use=kind, index=index, count=COUNT, visible_chosen=visible_chosen)
    return index


def set_device(device, *_):
    index = use(0 if device is None else device, "set")
    state.gpu = index if index >= 0 else state.gpu  # PyTorch ignores others


class OnTheCPU(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of every PyTorch call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in (Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        if func in ANSWERED and script_line(direct=True):
            translated(ANSWERED[func])
            return use(None) if func is Tensor.get_device else True
        if func is Tensor.cuda:
            translated(".cuda()")
            use(args[1] if len(args) > 1 else kwargs.get("device"))
            return args[0]
        place = NUMBERED.get(func)
        if place is not None and len(args) > place and type(args[place]) is int:
            args = (*args[:place], torch.device("cuda", args[place]), *args[place + 1 :])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        for gpu in [value for value in (*args, *kwargs.values()) if is_gpu(value)][:1]:
            translated(f'"{gpu}"')
            use(gpu)
            args = tuple(CPU if is_gpu(value) else value for value in args)
            kwargs = {name: CPU if is_gpu(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


class Idle(contextlib.nullcontext):
    """A stream, an event or a context of one: on the CPU, everything has happened already."""

    def __init__(self, *_, **__):
        super().__init__(self)
        translated("a stream or an event")

    def elapsed_time(self, _):
        return 1.0

    def __getattr__(self, name):  # what it waits for has happened, what it asks for is true
        return lambda *_: self


class Generator(torch.Generator):
    """Generates numbers on the CPU."""

    def __new__(cls, device=CPU):
        if isinstance(device, int) or is_gpu(device):
            translated("torch.Generator(device)")
        return super().__new__(cls, CPU)


torch.Generator = Generator
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
ANSWERS |= dict.fromkeys(("current_device", "current_device_index"), lambda: state.gpu)
ANSWERS |= dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), set_device)
# What libraries may also call; torch.manual_seed seeds the CPU.
QUIET = "set_device|init$|synchronize|empty_cache|ipc_collect|manual_seed"


def answer(original, *args, **kwargs):
    name = original.__name__
    if script_line(direct=True):
        translated(f"{original.__module__}.{name}()")
    elif not re.match(QUIET, name):
        return original(*args, **kwargs)
    value = ANSWERS.get(name, 0)
    return value(*args, **kwargs) if callable(value) else value


for owner in (torch.cuda, torch.accelerator):
    for name, function in inspect.getmembers(owner, inspect.isfunction):
        if function.__module__.startswith(owner.__name__) and not name.startswith("_"):
            replace(owner, name, answer)


def replace_arguments(function, **changes):
    """Call a function with these arguments, and report those that they replace."""

    @patch(function)
    def on_the_cpu(original, *args, **kwargs):
        signature = inspect.signature(original)
        call = signature.bind(*args, **kwargs)
        for name, value in changes.items():
            given = call.arguments.get(name, signature.parameters[name].default)
            call.arguments[name] = value
            if given and given not in (value, "cpu", CPU):
                translated(f'"{given}"' if isinstance(given, str) else name)
                if value is None:  # it names the GPUs that it is to use
                    for device in given if isinstance(given, list | tuple) else [given]:
                        use(device)
        return original(*call.args, **call.kwargs)


replace_arguments(f"{DDP}.__init__", device_ids=None, output_device=None)
replace_arguments("torch.utils.data.DataLoader.__init__", pin_memory=False, pin_memory_device="")
replace_arguments("torch.load", map_location="cpu")
replace_arguments("torch.amp.GradScaler.__init__", device="cpu")
replace_arguments("torch.autocast.__init__", device_type="cpu")
replace_arguments(f"{C10D}.init_process_group", backend="gloo", device_id=None)


# DDP refuses SyncBatchNorm, which `normalize` computes, and communication in bfloat16.
for name in ("_passing_sync_batchnorm_handle", "_check_comm_hook"):
    setattr(DistributedDataParallel, name, lambda self, _: None)


def total(tensor, group):
    """Return the sum of a tensor over the ranks."""
    result = tensor.detach().clone()
    group.allreduce([result]).wait()  # not by a function that is patched
    return result


@patch("torch.nn.SyncBatchNorm.forward")
def normalize(original, self, tensor):
    """Normalize this rank's samples together with those of the others, as one batch."""
    translated("SyncBatchNorm")
    if not (self.training and dist.is_initialized()):
        return BatchNorm2d.forward(self, tensor)
    group = self.process_group or dist.group.WORLD
    rank, sizes = group.rank(), torch.zeros(group.size(), dtype=torch.int)
    sizes[rank] = len(tensor)
    sizes = total(sizes, group).tolist()
    before, after = sum(sizes[:rank]), sum(sizes[rank + 1 :])
    padded = torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [before, after])
    if padded.requires_grad:  # the losses of all ranks depend on it
        padded.register_hook(lambda gradient: total(gradient, group))
    batch = total(padded, group) + (padded - padded.detach())
    return BatchNorm2d.forward(self, batch)[before : before + len(tensor)]


OnTheCPU().__enter__()
