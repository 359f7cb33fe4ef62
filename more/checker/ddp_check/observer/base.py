"""What the observers share: their state, and how they report an event."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass, field

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id, _len_torch_dispatch_stack
from torch.optim import optimizer
from torch.utils.data import get_worker_info

from ddp_check.events import Drawn, Start, Trouble
from ddp_check.protocol import HERE, STACKS, VARIABLE, Task, is_own

TASK = Task(**json.loads(os.environ[VARIABLE]))
STEP_WRAPPER = (optimizer.__file__, "wrapper")  # function in which PyTorch calls optimizer.step()
torch_save, torch_load = torch.save, torch.load  # PyTorch's functions before they are patched


@dataclass
class SinceStep:
    """What has happened since the last step of an optimizer."""

    losses: list = field(default_factory=list)  # a field of `Step`, as are sample_count and inputs
    backwards: int = 0  # number of backward passes, without those inside another one
    sample_count: int = 0
    inputs: list = field(default_factory=list)

    forwards: list = field(default_factory=list)  # calls of DDP models, as `Forward` tuples
    reductions: int = 0  # number of backward passes that reduced gradients since zero_grad()
    bypasses: dict = field(default_factory=dict)  # number of a model -> line that bypasses DDP
    stale: bool = False  # whether the previous step's gradients were still there in backward()


@dataclass
class State:
    """What the observers of this process know."""

    pid: int | None = None  # ID of the process that opened the file; a fork opens another
    descriptor: int = -1  # descriptor of the file that this process reports to
    rank: int | str | None = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    reported: set = field(default_factory=set)  # keys of events that are reported only once
    # The group:
    in_collective: bool = False  # whether a collective is running
    gpu: int = 0  # number of the GPU that "cuda" means
    # Data (steps.py clears no_step_in_pass, and models.py clears batch_is_unevaluated):
    passes: int = 0  # number of passes over DataLoaders so far
    no_step_in_pass: bool = True  # whether no step was taken since the last pass began
    batch_is_unevaluated: bool = False  # whether no model has evaluated the last batch
    # Models:
    in_forward: bool = False  # whether a forward pass of DDP is running, which calls its model
    in_module: int = 0  # depth of nested calls of modules
    # The models inside DDP, kept because the script may have deleted the wrapper by the end:
    wrapped: list = field(default_factory=list)
    # Steps:
    since_step: SinceStep = field(default_factory=SinceStep)
    steps: int = 0  # number of optimizer steps so far
    in_scheduler: int = 0  # depth of nested calls, because one scheduler's step may call another's
    gradients_scaled: bool = False  # whether gradients are multiplied by a GradScaler's factor
    parameters: dict = field(default_factory=dict)  # id -> parameter of an optimizer
    # Files:
    changes_files: bool = False  # whether the observer itself is changing files


state = State()


def report(kind, where="", **values):
    """Write an event to the file of this process, or, in a DataLoader worker, of its rank.

    Without `where`, the event has the line of the script that is running. A DataLoader worker
    reports only its random numbers.
    """
    with harmless():  # a full disk, or a value that JSON cannot hold, must not break the script
        in_worker = get_worker_info() is not None
        if in_worker and kind is not Drawn:
            return
        pid = multiprocessing.parent_process().pid if in_worker else os.getpid()
        if state.pid != pid:  # the first event of a process, or of a fork
            open_files(pid)
        event = kind(time=time.monotonic(), where=where or script_line(), **values)
        os.write(state.descriptor, f"{event}\n".encode(errors="replace"))


def open_files(pid):
    """Open a file for a process's events, and one for its stack, which the checker may request."""
    state.pid = pid
    path, mode = os.path.join(TASK.events, str(pid)), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    state.descriptor = os.open(f"{path}.jsonl", mode)
    faulthandler.register(STACKS, os.open(f"{path}.stack", mode), all_threads=False)


def ask(question, *arguments, default=None):
    """Return the answer to a question about an object of the script, or the default.

    Such an object may run any code when it is asked for a length, an attribute or a comparison.
    An error that it raises must not reach the script, and is not a fault of the observer.
    """
    try:
        return question(*arguments)
    except Exception:
        return default


@contextlib.contextmanager
def harmless():
    """Let the observer's own work fail without breaking the script.

    An error here is a fault of the observer, so it is reported. Inside the block, no
    `__torch_function__` of the script is called, so none notices what the observer computes.
    """
    try:
        with DisableTorchFunction():
            yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        if is_first("trouble", line):
            report(Trouble, error=f"{type(error).__name__}: {ask(str, error)} ({line})")


def is_first(*key):
    """Return whether this is the first call with this key."""
    is_new = key not in state.reported
    state.reported.add(key)
    return is_new


def script_line(direct=False, frame=None):
    """Return the line of the script that is running, as "file:line", or "" if none is.

    The file is relative to the folder that the script runs in.

    frame: the innermost frame to look at, if it is not the caller's
    direct: return only a line that itself calls the patched function, such as torch.load, and ""
        if the script calls a library that calls it, such as timm.load_checkpoint
    """
    frame = frame or sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        # Skip a `print` or a stream's `write` that the script defines, because its caller counts.
        if is_own(path) and frame.f_code.co_name not in ("print", "write"):
            path = os.path.normpath(os.path.join(TASK.folder, path))
            return f"{path.removeprefix(TASK.folder)}:{frame.f_lineno}"
        if direct and not path.startswith(f"{HERE}{os.sep}"):  # code of a library
            return ""
        frame = frame.f_back
    return ""


def callers():
    """Return the code of all functions that are running, the innermost first."""
    return [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]


def depth_of_steps():
    """Return how many optimizer steps are running, one inside another."""
    return [(code.co_filename, code.co_name) for code in callers()].count(STEP_WRAPPER)


def in_backward():
    """Return whether a backward pass is running."""
    return _current_graph_task_id() >= 0


def is_recorded():
    """Return whether PyTorch records computations; if so, the observer must not compute.

    PyTorch does so in torch.jit.trace, and in modes such as FlopCounterMode.
    """
    return torch.jit.is_tracing() or _len_torch_dispatch_stack() > 0


def save_for_checker(name, values):
    """Save values in the folder of the events; only rank 0 does so."""
    if int(state.rank or 0):
        return
    path = os.path.join(TASK.events, name)
    torch_save(values, f"{path}.new")
    os.replace(f"{path}.new", path)


report(Start, rank=state.rank)  # has to be the first event of the process
