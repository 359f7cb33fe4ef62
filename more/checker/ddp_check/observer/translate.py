"""Translates GPU calls, so that a script that was written for GPUs runs on the CPU."""

import contextlib
import inspect
import os
import re
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ddp_check.observer.base import TASK, script_line, state
from ddp_check.observer.patches import C10D, DDP, intercept, patch

CPU = torch.device("cpu")
COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", TASK.nproc))
ALL_GPUS = ",".join(map(str, range(COUNT)))
if not os.environ.get("CUDA_VISIBLE_DEVICES") and not os.path.exists("/dev/nvidiactl"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ALL_GPUS  # libraries read from it which GPUs exist
ATTRIBUTES = (Tensor.get_device, Tensor.is_cuda.__get__)  # they tell whether a GPU holds a tensor
DEVICE_AT = {Tensor.to: 1, torch._C._nn._parse_to: 0}  # function -> index of its device argument


def names_gpu(value):
    """Return whether a value is a GPU, or the name of one."""
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def gpu_index(device):
    """Return the number of a GPU, given as a device, a number, or None for the current GPU.

    The result is -1 for a CPU.
    """
    if str(device).startswith("cpu"):
        return -1
    index = device if isinstance(device, int | None) else torch.device(device).index
    return state.gpu if index is None else index


def set_device(device, *_):
    """Replace torch.cuda.set_device and, like it, ignore a negative number."""
    if gpu_index(device) >= 0:
        state.gpu = gpu_index(device)


class OnTheCPU(TorchFunctionMode):
    """Replaces GPUs with the CPU in the arguments of PyTorch calls, but not in nested lists."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:  # a device may be a GPU, because calls with it are translated
            return func(*args, **kwargs)
        if func in (Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        if func in ATTRIBUTES and script_line(direct=True):
            return state.gpu if func is Tensor.get_device else True
        if func is Tensor.cuda:
            return args[0]
        args, kwargs = without_gpus(*numbers_as_devices(func, args, kwargs))
        return func(*args, **kwargs)


def numbers_as_devices(func, args, kwargs):
    """Return the arguments of a call with a device in place of the bare number of a GPU."""
    index = DEVICE_AT.get(func)
    if index is not None and len(args) > index and type(args[index]) is int:
        args = (*args[:index], torch.device("cuda", args[index]), *args[index + 1 :])
    if type(kwargs.get("device")) is int:
        kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
    return args, kwargs


def without_gpus(args, kwargs):
    """Return the arguments of a call with the CPU in place of each GPU."""
    args = [CPU if names_gpu(value) else value for value in args]
    return args, {name: CPU if names_gpu(value) else value for name, value in kwargs.items()}


class Ignored:
    """Replaces what only GPUs need. A method that is not defined here returns the object itself."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __call__(self, function):  # when it is used as a decorator
        return function

    def __getattr__(self, name):
        return lambda *_, **__: self


class Idle(Ignored):
    """A stream or an event. `event.query()` returns the object itself, which means "done"."""

    def __init__(self, *_, **__):
        pass

    def elapsed_time(self, _):
        return 1.0


@contextlib.contextmanager
def current_gpu(device):
    """Replace torch.cuda.device: inside the block, "cuda" means this GPU."""
    before = state.gpu
    set_device(device)
    try:
        yield
    finally:
        state.gpu = before


class Generator(torch.Generator):
    """Generates random numbers on the CPU, whatever device is asked for."""

    def __new__(cls, device=CPU):
        return super().__new__(cls, CPU)


torch.Generator, torch.cuda.device = Generator, current_gpu
for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
    setattr(torch.cuda, name, Idle)
torch.cuda.nvtx = torch.cuda.profiler = Ignored()
for name in [name for name in dir(torch.cuda) if name.endswith("Tensor")]:
    setattr(torch.cuda, name, getattr(torch, name))
ANSWERS = {  # what functions about GPUs return; all others return 0
    "is_available": True,
    "is_initialized": True,
    "device_count": COUNT,
    "get_device_name": "CPU",
    "get_device_capability": (8, 0),
    "get_device_properties": SimpleNamespace(
        name="CPU", total_memory=1 << 30, major=8, minor=0, multi_processor_count=1
    ),
    "is_bf16_supported": True,
    "current_accelerator": torch.device("cuda"),
    "mem_get_info": (1 << 30, 1 << 30),
    "memory_stats": defaultdict(int),
}
ANSWERS |= dict.fromkeys(("current_device", "current_device_index"), lambda: state.gpu)
ANSWERS |= {
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()] * COUNT,
}
ANSWERS |= dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), set_device)
# Matches functions that are replaced for libraries, too, because they would fail without a GPU.
QUIET = "set_device|init$|synchronize|empty_cache|ipc_collect|manual_seed"


def answer(original, *args, **kwargs):
    """Return the answer in `ANSWERS` to the script, or to a library if `QUIET` matches the name."""
    name = original.__name__
    if not (script_line(direct=True) or re.match(QUIET, name)):
        return original(*args, **kwargs)  # a library gets the real answer
    value = ANSWERS.get(name, 0)
    return value(*args, **kwargs) if callable(value) else value


for owner in (torch.cuda, torch.accelerator):
    for name, function in inspect.getmembers(owner, inspect.isfunction):
        if function.__module__.startswith(owner.__name__) and not name.startswith("_"):
            intercept(owner, name, answer)


def replace_arguments(name, **replacements):
    """Replace these arguments in all calls of a function."""

    @patch(name)
    def on_the_cpu(original, *args, **kwargs):
        """Replace arguments that name GPUs."""
        call = inspect.signature(original).bind(*args, **kwargs)
        call.arguments |= replacements
        return original(*call.args, **call.kwargs)


replace_arguments(f"{DDP}.__init__", device_ids=None, output_device=None)
replace_arguments("torch.utils.data.DataLoader.__init__", pin_memory=False, pin_memory_device="")
replace_arguments("torch.load", map_location="cpu")
replace_arguments("torch.set_default_device", device="cpu")
replace_arguments("torch.amp.GradScaler.__init__", device="cpu")
replace_arguments(f"{C10D}.init_process_group", backend="gloo", device_id=None)
replace_arguments(f"{C10D}.new_group", backend="gloo")
replace_arguments("torch.distributed.device_mesh.init_device_mesh", device_type="cpu")


@patch("torch.autocast.__init__")
def autocast(original, self, device_type, dtype=None, enabled=True, cache_enabled=None):
    """Compute in float32 what a GPU computes in a lower precision, in which most CPUs are slow."""
    if device_type != "cpu":
        device_type, enabled = "cpu", False
    original(self, device_type, dtype, enabled, cache_enabled)


# On a CPU, DDP refuses SyncBatchNorm, which level.py makes work, and bfloat16 communication.
for name in ("_passing_sync_batchnorm_handle", "_check_comm_hook"):
    setattr(DistributedDataParallel, name, lambda self, _: None)


OnTheCPU().__enter__()
