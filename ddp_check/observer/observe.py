"""Reports what a training script does, one JSON object per line, without changing its results.

Each process writes to a file of its own, named after its process ID, in the folder DDP_CHECK. Each
object has a kind, a time in seconds and, where it applies, the line of the script in "where".
"""

import atexit
import contextlib
import faulthandler
import functools
import json
import operator
import os
import re
import shutil
import signal
import sys
import time
import zlib
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    SequentialSampler,
    Subset,
    dataloader,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

FOLDER = os.environ["DDP_CHECK"]
LIBRARY = re.compile(r"/lib(64)?/python3|/site-packages/|^<|/tests/observer/")
STACKS = signal.SIGRTMIN + 5  # asks a process for the lines that it runs
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "scatter",
    "reduce_scatter_tensor",
    "scatter_object_list",
    "all_to_all",
    "all_to_all_single",
]
SCALE = int(os.environ.get("DDP_CHECK_SCALE", "0"))  # of the batch; also: in double precision
STEPS = 3  # compared between world sizes
torch_save = torch.save
wrapped = []  # the plain models inside DDP, which may themselves be gone at the end
loose = {}  # what optimizers change, by identity
state = {
    "pid": None,
    "passes": 0,
    "steps": 0,
    "backwards": 0,
    "evaluated": None,
    "inside": 0,
    "nested": 0,
    "forwards": [],
    "forward": False,
    "described": False,
    "new_pass": True,
}


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


def called_by_script():
    """Return whether the script itself, not a library, called the watched function."""
    frame = sys._getframe(1)
    while frame and "/tests/observer/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame and not LIBRARY.search(frame.f_code.co_filename)


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
        with contextlib.suppress(Exception):  # an exotic tensor must not end the reader's script
            dense = local.coalesce().values() if local.is_sparse else local
            flat = dense.detach().cpu().contiguous().flatten()
            total = zlib.crc32(flat.view(torch.uint8).numpy(), total) if flat.numel() else total
    return total


def this_rank():
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


# ---------------------------------------------------------------- the process group


@watch(c10d, "init_process_group")
def init_process_group(do, *args, **kwargs):
    early = "torch.distributed.nn" in sys.modules
    result = do(*args, **kwargs)
    method = str(kwargs.get("init_method") or (args[1] if len(args) > 1 else ""))
    named = re.fullmatch(r"tcp://.*:(\d+).*", method)
    port = named[1] if named else os.environ.get("MASTER_PORT")
    say("init", rank=dist.get_rank(), port=port, nn=early, where=where())
    return result


@watch(c10d, "destroy_process_group")
def destroy_process_group(do, *args, **kwargs):
    describe_models()
    say("destroy", where=where())
    return do(*args, **kwargs)


Group = dist.ProcessGroup


def watch_collective(name):
    @watch(c10d, name)
    def collective(do, *args, **kwargs):
        groups = [value for value in (*args, *kwargs.values()) if isinstance(value, Group)]
        of_all = all(group is dist.group.WORLD for group in groups)
        if not state["inside"] and of_all:  # all_gather_object calls all_gather
            line = where()
            if line:  # called by the script, or by a library on its behalf
                say("collective", name=name, where=line)
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
    wrapped.append(module)
    shapes = [[name, list(value.shape)] for name, value in module.named_parameters()]
    buffers = sum(1 for _ in module.buffers())
    weights = checksum(module.parameters())
    say("wrap", shapes=shapes, weights=weights, buffers=buffers, where=where())
    module.register_forward_pre_hook(lambda module, _: called(module))


def called(module):
    """Report that a wrapped model is called without DDP in training, or first in an evaluation."""
    if module.training and torch.is_grad_enabled() and not state["forward"]:
        say("bypass", where=where())
    if not module.training and state["evaluated"] != state["passes"]:
        state["evaluated"] = state["passes"]
        buffers = list(module.buffers())
        if buffers:
            say("evaluated", buffers=checksum(buffers), steps=state["steps"], where=where())


@watch(DDP, "forward")
def forward(do, self, *args, **kwargs):
    state["forward"] = True
    if torch.is_grad_enabled() and self.module.training:
        synced = self.require_backward_grad_sync
        state["forwards"].append((id(self), state["backwards"], synced))
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


@watch(torch.autograd, "backward")
def backward(do, *args, **kwargs):
    state["backwards"] += 1
    return do(*args, **kwargs)


def reductions():
    """Return how often the gradients of a model were reduced since the last step."""
    calls = {(model, number) for model, number, synced in state["forwards"] if synced}
    return max(Counter(model for model, _ in calls).values(), default=0)


@register_optimizer_step_pre_hook
def step(optimizer, args, kwargs):
    state["nested"] += 1  # the step of one optimizer may call that of another
    if state["nested"] == 1:
        report_step(optimizer, closure=len(args) > 1 or kwargs.get("closure") is not None)


@register_optimizer_step_post_hook
def stepped(optimizer, args, kwargs):
    state["nested"] -= 1


def report_step(optimizer, closure):
    state["steps"] += 1
    theirs = {id(value): value for group in optimizer.param_groups for value in group["params"]}
    loose.update(theirs)
    inside = {id(value) for module in wrapped for value in module.parameters()}
    mine = [
        module for module in wrapped if any(id(value) in theirs for value in module.parameters())
    ]
    if SCALE and wrapped and this_rank() == 0 and state["steps"] <= STEPS:
        named = [module.named_parameters() for module in wrapped]
        keep(f"step{state['steps']}", [[(n, p.detach(), p.grad) for n, p in of] for of in named])
    gradients = [value.grad for value in theirs.values() if value.grad is not None]
    sharded = is_sharded(theirs.values())
    say(
        "step",
        gradients=checksum(gradients),
        weights=checksum(theirs.values()) if state["new_pass"] else None,
        zero=not any(value.any() for value in gradients),
        unused=sum(value.grad is None and value.requires_grad for value in theirs.values()),
        foreign=0 if sharded else len(theirs.keys() - inside),
        sharded=sharded,
        closure=closure,  # which computes the gradients, later
        reductions=reductions(),
        synced=all(synced for *_, synced in state["forwards"][-1:]),
        training=all(module.training for module in mine),
        random=checksum([torch.get_rng_state()]),
        where=where(),
    )
    state["forwards"], state["new_pass"] = [], False


def is_sharded(values):
    """Return whether these are parameters of FSDP or tensor parallelism."""
    return any(hasattr(v, "to_local") or hasattr(v, "_fsdp_flattened") for v in values)


def describe_models():
    """Report the weights that the models end with, and keep those of rank 0."""
    state["described"] = True
    if is_sharded(loose.values()):
        return
    models = [module.state_dict() for module in wrapped]
    if not models and loose:
        models = [{f"parameter {number}": value for number, value in enumerate(loose.values())}]
    parameters = [module.parameters() for module in wrapped] or [loose.values()]
    for values in parameters:
        say("final", weights=checksum(values), steps=state["steps"])
    if models and this_rank() == 0:
        keep("final", models)


def keep(name, values):
    """Write tensors to a file for the comparison with another run."""
    path = os.path.join(FOLDER, name)
    torch_save(values, f"{path}.new")
    os.replace(f"{path}.new", path)


# ---------------------------------------------------------------- the data


def contents(dataset):
    """Return the data set that Subsets take samples from, and the indices that they keep."""
    indices = None
    while isinstance(dataset, Subset):
        kept = dataset.indices
        indices = [int(kept[index]) for index in (range(len(kept)) if indices is None else indices)]
        dataset = dataset.dataset
    return dataset, indices


def fingerprint(value, depth=5):
    """Return a checksum that equal data sets have in common."""
    if isinstance(value, torch.Tensor):
        return checksum([value])
    if isinstance(value, str | bytes | int | float):
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "tobytes") and value.nbytes < 1e8:
        return zlib.crc32(value.tobytes())
    items = value if isinstance(value, list | tuple) else getattr(value, "__dict__", ())
    items = list((items if isinstance(items, list | tuple) else items.items()) if depth else ())
    return zlib.crc32(repr([fingerprint(item, depth - 1) for item in items[:30]]).encode())


def begin(loader, iterator):
    state["passes"] += 1
    state["new_pass"] = True
    dataset, kept = contents(loader.dataset)
    iterator._ddp_check = {"number": state["passes"], "asked": [], "given": 0, "kept": kept}
    iterator._ddp_check["iterable"] = isinstance(dataset, dataloader.IterableDataset)
    sampler = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    say(
        "pass",
        number=state["passes"],
        samples=len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        iterable=iterator._ddp_check["iterable"],
        distributed=isinstance(sampler, DistributedSampler),
        shuffle=not isinstance(sampler, SequentialSampler) and getattr(sampler, "shuffle", True),
        drop_last=loader.drop_last or getattr(sampler, "drop_last", False),
        tensors=checksum(getattr(dataset, "tensors", ())),
        data=fingerprint(dataset),
        where=where(),
    )


Base = dataloader._BaseDataLoaderIter


@watch(dataloader.DataLoader, "__init__")
def load_data(do, self, dataset, batch_size=1, *args, **kwargs):
    scalable = SCALE and batch_size and kwargs.get("batch_sampler") is None
    do(self, dataset, batch_size * SCALE if scalable else batch_size, *args, **kwargs)


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
    try:
        indices = [operator.index(index) for index in listed(indices)]
    except TypeError:
        indices = None
    content = checksum(tensors_of(batch)) if mine["iterable"] else None
    kept = mine["kept"]
    base = indices if kept is None or indices is None else [kept[index] for index in indices]
    say("batch", number=mine["number"], indices=indices, base=base, content=content)
    return batch


def listed(indices):
    return indices if isinstance(indices, list | tuple) else [indices]


def tensors_of(batch):
    return [value for value in tree_leaves(batch) if isinstance(value, torch.Tensor)]


watch(Base, "__next__")(next_batch)


# ---------------------------------------------------------------- what is printed and written


class Printed:
    """A stream whose lines are reported."""

    def __init__(self, stream):
        self.stream, self.begun = stream, ""

    def write(self, text):
        *lines, self.begun = f"{self.begun}{text}".split("\n")
        for line in filter(str.strip, lines):
            say("print", text=line[:200], where=where())
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


sys.stdout = Printed(sys.stdout)


def audit(event, args):
    """Report files that are opened to be written, or renamed."""
    if event == "open" and isinstance(args[0], str) and re.search("[wax+]", str(args[1] or "")):
        unlink(args[0], args[1])
        written("open", args[0])
    elif event == "os.rename":
        written("rename", args[1], args[0])


def in_place(path):
    return path.startswith(os.environ["DDP_CHECK_CWD"])


def unlink(path, mode="w"):
    """Replace a link to a file of the reader, which is about to be written, by a file."""
    if os.path.islink(path) and in_place(os.path.abspath(path)):
        original = os.path.realpath(path)
        os.unlink(path)
        if "w" not in mode and os.path.isfile(original):
            shutil.copyfile(original, path)


def written(kind, path, source=None):
    path, line = os.path.realpath(os.fsdecode(path)), where()
    if line and (source or in_place(path)):
        source = source and os.path.realpath(os.fsdecode(source))
        say(kind, path=path if in_place(path) else None, source=source, where=line)


sys.addaudithook(audit)


@watch(torch, "save")
def save(do, obj, f, *args, **kwargs):
    keys = list(prefixed(obj))
    if isinstance(f, str | os.PathLike):
        unlink(f)
        say("save", path=os.path.realpath(f), keys=keys[:3], where=where())
    elif keys:
        name = getattr(f, "name", None)
        path = os.path.realpath(name) if isinstance(name, str) else None
        say("save", path=path, keys=keys[:3], where=where())
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
    if called_by_script():
        say("load", weights_only=only is None or only, where=where())
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
    if not state["described"]:
        describe_models()
    left = 0
    for _ in range(20):  # Linux lists a thread for a moment after it has ended
        left = 0 if open_group else gloo_threads()
        if not left:
            break
        time.sleep(0.1)
    nn = "torch.distributed.nn" in sys.modules
    say("exit", open_group=open_group, threads=left, nn=nn)


stacks = open(os.path.join(FOLDER, f"{os.getpid()}.stack"), "w", encoding="utf-8")  # noqa: SIM115
faulthandler.register(STACKS, file=stacks, all_threads=False)
if os.environ.get("DDP_CHECK_TRANSLATE"):
    import translate  # noqa: F401
say("start", rank=os.environ.get("RANK", os.environ.get("SLURM_PROCID")))
