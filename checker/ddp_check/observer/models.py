"""Observes models wrapped in DDP, and calls of any model."""

import functools
import os
import time
import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

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
from ddp_check.observer.values import batch_checksum, checksums, is_finite, mesh_dimensions

SHORTER = (torch.FloatTensor, torch.BFloat16Tensor, torch.HalfTensor)  # than float64
SHARDED = {"FSDPModule", "FullyShardedDataParallel"}  # importing them would take seconds
model_numbers = {}  # identity of a module in a wrapped model -> the number of that model
known_buffers = set()  # names of those that need no more checksums
buffers_at_start = {}  # name of a buffer -> its checksum when its model was wrapped


class Forward(NamedTuple):
    """A call of a DDP model in training mode."""

    model: int
    backwards: int  # that came before it
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
        model_numbers.update((id(part), number) for part in module.modules())
        state.wrapped.append(module)
        state.wrappers.append(weakref.ref(self))
        known_buffers.update(shared_buffers(module, number))
        buffers_at_start.update(buffer_checksums(module, number))
        report(events.Wrap, names=[name for name, _ in module.named_parameters()])


def of_model(number):
    """Return what follows the names in a wrapped model, unless it is the first."""
    return f" of model {number + 1}" if number else ""


def buffer_checksums(module, number, known=()):
    """Return checksums of some elements of each buffer, by name, without those that are known."""
    named = ((f"{name}{of_model(number)}", value) for name, value in module.named_buffers())
    return {name: batch_checksum(value) for name, value in named if name not in known}


def shared_buffers(module, number):
    """Return the names of the buffers of SyncBatchNorm, which all ranks update together."""
    return {
        f"{name}.{buffer}{of_model(number)}"
        for name, part in module.named_modules()
        if isinstance(part, nn.SyncBatchNorm)
        for buffer, _ in part.named_buffers(recurse=False)
    }


@patch(f"{DDP}.register_comm_hook")
def register_comm_hook(original, self, hook_state, hook):
    name = ask(lambda: f"{hook.__module__}.{hook.__qualname__}", default="")
    report(events.CommHook, name=name)
    return original(self, hook_state, hook)


@patch(f"{DDP}.forward")
def forward(original, self, *args, **kwargs):
    """Note the inputs of a training call, and whether its gradients will be reduced."""
    state.in_forward = True
    with harmless:
        if torch.is_grad_enabled() and self.module.training:
            number = model_numbers.get(id(self.module), -1)
            call = Forward(number, state.backwards, self.require_backward_grad_sync)
            state.since_step.forwards.append(call)
            state.since_step.inputs.append(batch_checksum([args, kwargs]))
    if TASK.scale:
        args, kwargs = tree_map_only(SHORTER, torch.Tensor.double, (args, kwargs))
    try:
        return original(self, *args, **kwargs)
    finally:
        state.in_forward = False


# ---------------------------------------------------------------- calls of modules


@hooks.register_module_forward_pre_hook
def enter(module, _):
    """Look at a call of any module."""
    if is_compiling():
        return  # the hooks would become a part of the graph
    state.depth += 1
    with harmless:
        if state.depth == 1:
            attribute_to_script()
        if torch.is_grad_enabled():
            enter_training(module)
        elif module in state.wrapped or (state.depth == 1 and not is_wrapper(module)):
            enter_evaluation(module)


@functools.partial(hooks.register_module_forward_hook, always_call=True)
def leave(module, _, __):
    if is_compiling():
        return
    state.depth -= 1
    if state.depth == 0:
        with harmless:
            attribute_draws("model")


def is_wrapper(module):
    return isinstance(module, DistributedDataParallel)


def enter_training(module):
    """Report a training call that bypasses DDP, and note what enters a sharded model."""
    in_backward = torch._C._current_graph_task_id() >= 0  # where checkpoints call modules again
    beside = module.training and id(module) in model_numbers
    if beside and not (state.in_forward or in_backward):
        number = model_numbers[id(module)]
        if requires_grad(module) and is_first("bypassed", number):
            report(events.Bypass, script_line(skip=model_numbers), model=number)
    if SHARDED & {kind.__name__ for kind in type(module).__mro__} and is_first("sharded"):
        module.register_forward_pre_hook(note_inputs, with_kwargs=True)


def requires_grad(module):
    return any(value.requires_grad for value in module.parameters())


def note_inputs(module, args, kwargs):
    with harmless:
        if torch.is_grad_enabled():
            state.since_step.inputs.append(batch_checksum([args, kwargs]))


def enter_evaluation(module):
    """Report the first call of an evaluation after a batch, and in a pass."""
    if state.new_batch:
        report(events.Looked)
    state.new_batch = False
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not values or mesh_dimensions(values.values()):
        return
    if is_first("evaluated", id(module), state.passes):
        report(
            events.Evaluated,
            model=type(module).__name__,
            steps=state.steps,
            values=checksums(values),
            noisy=next((type(part).__name__ for part in module.modules() if is_noisy(part)), ""),
            wrapped=module in state.wrapped,
            number=state.passes,
        )


def is_noisy(module):
    """Return whether a module is in training mode, and its result depends on that."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    drops_out = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and (drops_out or norm)


# ---------------------------------------------------------------- the end


def describe_models():
    """Report checksums of the final weights, and save those of rank 0."""
    if mesh_dimensions(state.parameters.values()) or not is_first("final"):
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
