"""Reports what a training script does, one JSON object per line, without changing its results.

Each process writes to a file of its own, named after its process ID, in the folder DDP_CHECK. Each
object has a kind, a time in seconds and, where it applies, the line of the script in "where".
"""

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import re
import signal
import sys
import time
import zlib

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import dataloader, get_worker_info

FOLDER = os.environ["DDP_CHECK"]
LIBRARY = re.compile(r"/lib(64)?/python3|/site-packages/|^<|/tests/observer/")
STACKS = signal.SIGRTMIN + 5  # asks a process for the lines that it runs
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "scatter"),
    *("reduce_scatter_tensor", "scatter_object_list", "all_to_all", "all_to_all_single"),
)
SCALE = int(os.environ.get("DDP_CHECK_SCALE", "0"))  # of the batch; also: in double precision
STEPS = 3  # compared between world sizes
torch_save = torch.save
wrapped = []  # the plain models inside DDP, which may themselves be gone at the end
state = {"pid": None, "passes": 0, "steps": 0, "inside": 0, "synced": []}


def say(kind, **values):
    """Report something, unless this is a worker of a DataLoader."""
    if get_worker_info():
        return
    if state["pid"] != os.getpid():  # at the start, and after a fork
        state["pid"] = os.getpid()
        path = os.path.join(FOLDER, f"{os.getpid()}.jsonl")
        state["file"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    text = json.dumps({"kind": kind, "time": time.monotonic(), **values}, default=str)
    os.write(state["file"], text.encode() + b"\n")


def where():
    """Return the line of the script that is running, as "file:line"."""
    frame = sys._getframe(1)
    while frame:
        if not LIBRARY.search(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def watch(owner, name):
    """Replace a function or method by `function(original, *arguments)`."""

    def decorate(function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, call)
        return call

    return decorate


def checksum(tensors):
    """Return a checksum of the bits of these tensors; of a sharded one, those of this rank."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().cpu().contiguous().flatten()
        total = zlib.crc32(flat.view(torch.uint8).numpy(), total) if flat.numel() else total
    return total


# ---------------------------------------------------------------- the process group


@watch(c10d, "init_process_group")
def init_process_group(do, *args, **kwargs):
    result = do(*args, **kwargs)
    rank, world = dist.get_rank(), dist.get_world_size()
    say("init", rank=rank, world=world, port=os.environ.get("MASTER_PORT"), where=where())
    return result


@watch(c10d, "destroy_process_group")
def destroy_process_group(do, *args, **kwargs):
    describe_models()
    say("destroy", where=where())
    return do(*args, **kwargs)


def watch_collective(name):
    @watch(c10d, name)
    def collective(do, *args, **kwargs):
        if not state["inside"]:  # all_gather_object calls all_gather
            shapes = [str(tuple(value.shape)) for value in args if isinstance(value, torch.Tensor)]
            line = where()
            if line:  # called by the script, or by a library on its behalf
                say("collective", name=name, shapes=shapes, where=line)
        state["inside"] += 1
        try:
            return do(*args, **kwargs)
        finally:
            state["inside"] -= 1

    return collective


for name in (*COLLECTIVES, "init_process_group", "destroy_process_group"):
    if name in COLLECTIVES:
        watch_collective(name)
    setattr(dist, name, getattr(c10d, name))


# ---------------------------------------------------------------- the model and its gradients


@watch(DDP, "__init__")
def wrap(do, self, module, *args, **kwargs):
    state["inside"] += 1
    if SCALE:
        module.double()
    try:
        do(self, module, *args, **kwargs)
    finally:
        state["inside"] -= 1
    wrapped.append((module, self.process_group.group_name))
    shapes = [[name, list(value.shape)] for name, value in module.named_parameters()]
    say("wrap", shapes=shapes, weights=checksum(module.parameters()), where=where())
    module.register_forward_pre_hook(
        lambda module, _: None if state.get("forward") else bypassed(module)
    )


def bypassed(module):
    """The wrapped model is called, but not by DDP."""
    if module.training and torch.is_grad_enabled():
        say("bypass", where=where())


@watch(DDP, "forward")
def forward(do, self, *args, **kwargs):
    state["forward"] = True
    if torch.is_grad_enabled() and self.module.training:
        state["synced"].append(self.require_backward_grad_sync)
    if SCALE:
        args = [doubled(value) for value in args]
        kwargs = {name: doubled(value) for name, value in kwargs.items()}
    try:
        return do(self, *args, **kwargs)
    finally:
        state["forward"] = False


def doubled(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


@register_optimizer_step_pre_hook
def step(optimizer, args, kwargs):
    state["steps"] += 1
    theirs = [value for group in optimizer.param_groups for value in group["params"]]
    ours = {id(value) for module, _ in wrapped for value in module.parameters()}
    if SCALE and dist.get_rank() == 0 and state["steps"] <= STEPS:
        named = [module.named_parameters() for module, _ in wrapped]
        keep(f"step{state['steps']}", [[(n, p.detach(), p.grad) for n, p in of] for of in named])
    gradients = [value.grad for value in theirs if value.grad is not None]
    sharded = any(hasattr(value, "to_local") for value in theirs)
    say(
        "step",
        gradients=checksum(gradients),
        zero=not any(value.any() for value in gradients),
        foreign=sum(id(value) not in ours for value in theirs) if not sharded else 0,
        sharded=sharded,
        synced=state["synced"],  # for each forward pass since the last step
        training=all(module.training for module, _ in wrapped),
        random=checksum([torch.get_rng_state()]),
        where=where(),
    )
    state["synced"] = []


def describe_models():
    """Report the weights and buffers that the models end with, and keep those of rank 0."""
    for module, _ in wrapped:
        values = checksum(module.parameters())
        say("final", weights=values, buffers=checksum(module.buffers()), steps=state["steps"])
    if dist.get_rank() == 0:
        keep("final", [module.state_dict() for module, _ in wrapped])


def keep(name, values):
    """Write tensors to a file for the comparison with another run."""
    path = os.path.join(FOLDER, name)
    torch_save(values, f"{path}.new")
    os.replace(f"{path}.new", path)


# ---------------------------------------------------------------- the data


def begin(loader, iterator):
    state["passes"] += 1
    iterator._ddp_check = {"number": state["passes"], "asked": [], "given": 0}
    sized = hasattr(loader.dataset, "__len__")
    say(
        "pass",
        number=state["passes"],
        loader=id(loader),
        samples=len(loader.dataset) if sized else None,
        iterable=isinstance(loader.dataset, dataloader.IterableDataset),
        sampler=type(loader.sampler).__name__,
        drop_last=loader.drop_last,
        workers=loader.num_workers,
        data=checksum(getattr(loader.dataset, "tensors", ())),
        buffers=[checksum(module.buffers()) for module, _ in wrapped if not module.training],
        where=where(),
    )


Base = dataloader._BaseDataLoaderIter


@watch(dataloader.DataLoader, "__init__")
def load_data(do, self, dataset, batch_size=1, *args, **kwargs):
    scaled = batch_size * SCALE if SCALE and batch_size else batch_size
    do(self, dataset, scaled, *args, **kwargs)


@watch(Base, "__init__")
def start(do, self, loader):
    do(self, loader)
    begin(loader, self)


@watch(Base, "_reset")
def restart(do, self, loader, first_iter=False):
    do(self, loader, first_iter)
    if not first_iter:  # persistent workers: the iterator of the epoch before
        begin(loader, self)


@watch(Base, "_next_index")
def next_index(do, self):
    index = do(self)
    self._ddp_check["asked"].append(index)  # workers are asked before their batch is wanted
    return index


def next_batch(do, self):
    mine = self._ddp_check
    try:
        batch = do(self)
    except StopIteration:
        say("end", number=mine["number"])
        raise
    indices = mine["asked"][mine["given"]]
    mine["given"] += 1
    indices = indices if isinstance(indices, list) else [indices]
    known = all(isinstance(index, int) for index in indices)
    say("batch", number=mine["number"], indices=indices if known else None, size=len(indices))
    return batch


watch(Base, "__next__")(next_batch)


# ---------------------------------------------------------------- what is printed and written


class Printed:
    """A stream whose lines are reported."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        for line in text.splitlines():
            if line.strip():
                say("print", text=line[:200], where=where())
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


sys.stdout = Printed(sys.stdout)


def audit(event, args):
    """Report files that are opened to be written, or renamed."""
    if event == "open" and isinstance(args[0], str) and re.search("[wax+]", str(args[1] or "")):
        written("open", args[0])
    elif event == "os.rename":
        written("rename", args[1], args[0])


def written(kind, path, source=None):
    path, line = os.path.realpath(os.fsdecode(path)), where()
    if line and path.startswith(os.environ["DDP_CHECK_CWD"]):
        say(kind, path=path, source=source and os.path.realpath(os.fsdecode(source)), where=line)


sys.addaudithook(audit)


@watch(torch, "save")
def save(do, obj, f, *args, **kwargs):
    keys = list(prefixed(obj))
    if isinstance(f, str | os.PathLike):
        say("save", path=os.path.realpath(f), keys=keys[:3], where=where())
    elif keys:
        say("save", path=getattr(f, "name", None), keys=keys[:3], where=where())
    result = do(obj, f, *args, **kwargs)
    say("saved", steps=state["steps"])
    return result


def prefixed(obj, prefix="module."):
    """Yield the keys of nested dictionaries that begin with a prefix."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            if isinstance(key, str) and key.startswith(prefix):
                yield key
            yield from prefixed(value)


@watch(torch, "load")
def load(do, f, *args, **kwargs):
    only = kwargs.get("weights_only")
    say("load", path=str(f), weights_only=only is None or only, where=where())
    return do(f, *args, **kwargs)


# ---------------------------------------------------------------- the end


@watch(signal, "signal")
def handle(do, number, handler):
    if number == signal.SIGTERM and handler not in (signal.SIG_DFL, signal.SIG_IGN) and where():
        say("handler", where=where())
    return do(number, handler)


def gloo_threads():
    names = []
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
                names.append(file.read().strip())
    return sum("gloo" in name for name in names)


@atexit.register  # before the script can register anything, so it is called last
def end():
    if state["pid"] != os.getpid():
        return
    open_group = dist.is_initialized()
    if open_group:
        describe_models()
    left = 0
    for _ in range(20):  # Linux lists a thread for a moment after it has ended
        left = 0 if open_group else gloo_threads()
        if not left:
            break
        time.sleep(0.1)
    say("exit", open_group=open_group, threads=left)


stacks = open(os.path.join(FOLDER, f"{os.getpid()}.stack"), "w", encoding="utf-8")  # noqa: SIM115
faulthandler.register(STACKS, file=stacks, all_threads=False)
if os.environ.get("DDP_CHECK_TRANSLATE"):
    import translate  # noqa: F401
say("start", argv=sys.argv, rank=os.environ.get("RANK"), parent=os.getppid())
