"""Observes models wrapped in DDP, and calls of any model."""

import functools
import inspect
import os
import time
import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_check import events
from ddp_check.observer import base
from ddp_check.observer.base import (
    TASK,
    ask,
    harmless,
    is_first,
    report,
    save_for_checker,
    script_line,
    state,
)
from ddp_check.observer.patches import C10D, DDP, patch
from ddp_check.observer.randomness import attribute_draws, attribute_to_script
from ddp_check.observer.values import (
    batch_checksum,
    checksums,
    in_double_precision,
    is_finite,
    mesh_dimensions,
)

SHARDED = {"FSDPModule", "FullyShardedDataParallel"}  # importing them would take seconds
model_numbers = {}  # identity of a module in a wrapped model -> the number of that model
watched = {}  # identity of a parameter whose gradient a DDP model reduces -> the parameter
buffers_at_start = {}  # name of a buffer -> its checksum when its model was wrapped


class Forward(NamedTuple):
    """A call of a DDP model that a backward pass may follow."""

    model: int
    backwards: int  # passes that came before it
    synced: bool  # its gradients will be reduced


# ---------------------------------------------------------------- wrapped models


@patch(f"{DDP}.__init__")
def wrap(original, self, module, *args, **kwargs):
    """Report a new DDP model. For the drill world-size, let two runs start from equal weights."""
    number = len(state.wrapped)
    if TASK.scale:
        module.double()
    path = os.path.join(TASK.start, f"start{number}")  # the weights it had in another run
    if TASK.start and os.path.exists(path):
        module.load_state_dict(base.torch_load(path, weights_only=True))
    original(self, module, *args, **kwargs)
    if TASK.scale:
        save_for_checker(f"start{number}", module.state_dict())
    with harmless:
        attribute_draws()  # what was drawn before made the model
        model_numbers.update((id(part), number) for part in module.modules())
        watched.update((id(value), value) for value in module.parameters() if value.requires_grad)
        state.wrapped.append(module)
        state.wrappers.append(weakref.ref(self))
        buffers_at_start.update(buffer_checksums(module, number))
        if self.find_unused_parameters:
            watch_use(module)
        report(events.Wrap, names=[name for name, _ in module.named_parameters()])


def watch_use(module):
    """Note which parameters this rank uses: DDP gives the rest a gradient if another rank does."""

    def watch(value):
        state.watched_for_use.add(id(value))
        value.register_hook(lambda gradient: state.since_step.used.add(id(value)))

    for value in module.parameters():
        if value.requires_grad:
            watch(value)


def of_model(number):
    """Return what follows the names in a wrapped model, unless it is the first."""
    return f" of model {number + 1}" if number else ""


def buffer_checksums(module, number):
    """Return checksums of some elements of each buffer, by name.

    Without those of SyncBatchNorm, which all ranks update together.
    """
    return {
        f"{path}.{name}{of_model(number)}".removeprefix("."): batch_checksum(value)
        for path, part in module.named_modules()
        if not isinstance(part, nn.SyncBatchNorm)
        for name, value in part.named_buffers(recurse=False)
    }


@patch(f"{DDP}.register_comm_hook")
def register_comm_hook(original, *args, **kwargs):
    hook = inspect.signature(original).bind(*args, **kwargs).arguments["hook"]
    name = ask(lambda: f"{hook.__module__}.{hook.__qualname__}", default="")
    report(events.CommHook, name=name)
    return original(*args, **kwargs)


@patch(f"{DDP}.forward")
def forward(original, self, *args, **kwargs):
    """Note the inputs of a training call, and whether its gradients will be reduced."""
    state.in_forward = True
    with harmless:
        if torch.is_grad_enabled():
            number = model_numbers.get(id(self.module), -1)
            call = Forward(number, state.total_backwards, self.require_backward_grad_sync)
            state.since_step.forwards.append(call)
        if torch.is_grad_enabled() and self.module.training:
            state.since_step.inputs.append(batch_checksum([args, kwargs]))
    if TASK.scale:
        args, kwargs = in_double_precision((args, kwargs))
    try:
        return original(self, *args, **kwargs)
    finally:
        state.in_forward = False


# ---------------------------------------------------------------- calls of modules


@hooks.register_module_forward_pre_hook
def enter(module, args):
    """Look at a call of any module."""
    if is_compiling():
        return  # the hooks would become a part of the graph
    state.depth += 1
    with harmless:
        if state.depth == 1:
            attribute_to_script()
            state.unused_batch = False
        if torch.is_grad_enabled():
            enter_training(module)
        elif module in state.wrapped or state.depth == 1:
            enter_evaluation(module, args)


@functools.partial(hooks.register_module_forward_hook, always_call=True)
def leave(module, _, __):
    if is_compiling():
        return
    state.depth -= 1
    if state.depth == 0:
        with harmless:
            attribute_draws("model")


def enter_training(module):
    """Note a training call that bypasses DDP, and what enters a sharded model."""
    in_backward = torch._C._current_graph_task_id() >= 0  # where checkpoints call modules again
    number, bypasses = model_numbers.get(id(module)), state.since_step.bypasses
    beside = number not in (None, *bypasses) and not (state.in_forward or in_backward)
    if beside and any(value.requires_grad for value in module.parameters()):
        bypasses[number] = script_line(skip=model_numbers)
    if SHARDED & {kind.__name__ for kind in type(module).__mro__} and is_first("sharded"):
        module.register_forward_pre_hook(note_inputs, with_kwargs=True)


def note_inputs(module, args, kwargs):
    with harmless:
        if torch.is_grad_enabled():
            state.since_step.inputs.append(batch_checksum([args, kwargs]))


def enter_evaluation(module, args):
    """Report the first call of an evaluation after a batch, and in a pass."""
    if isinstance(module, DistributedDataParallel):
        return  # it calls the wrapped model
    if state.new_batch:
        report(events.BatchEvaluated)
    state.new_batch = False
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not values or mesh_dimensions(values.values()):
        return
    if is_first("evaluated", id(module), state.passes):
        report(
            events.Evaluated,
            model=type(module).__name__,
            steps=state.steps,
            checksums=checksums(values),
            noisy=next((type(part).__name__ for part in module.modules() if is_noisy(part)), ""),
            wrapped=module in state.wrapped,
            pass_number=state.passes,
            inputs=batch_checksum(args),
        )


def is_noisy(module):
    """Return whether a module is in training mode, and its result depends on that."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    drops_out = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and (drops_out or norm)


# ---------------------------------------------------------------- the end


def describe_models():
    """Report checksums of the final weights, and save those of rank 0."""
    if mesh_dimensions(state.parameters.values()):
        return
    if not is_first("final"):
        return
    unwrapped = {f"parameter {at}": value for at, value in enumerate(state.parameters.values())}
    models = [dict(module.named_parameters()) for module in state.wrapped] or [unwrapped]
    for weights in models:
        finite = all(map(is_finite, weights.values()))
        report(events.Final, weights=checksums(weights), finite=finite)
    if any(models):
        save_for_checker("final", [module.state_dict() for module in state.wrapped] or models)


@patch(f"{C10D}.destroy_process_group")
def destroy_process_group(original, *args, **kwargs):
    with harmless:
        describe_models()
        live = sum(wrapper() is not None for wrapper in state.wrappers)
        report(events.Leave, live_wrappers=live)
    time.sleep(0.05)  # gloo's threads forget their last work, or freeing a DDP model could hang
    return original(*args, **kwargs)
