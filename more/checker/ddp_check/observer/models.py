"""Observes models wrapped in DDP, and calls of any model."""

import functools
import os
import time
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
    in_backward,
    is_first,
    is_recorded,
    report,
    save_for_checker,
    script_line,
    state,
)
from ddp_check.observer.patches import C10D, DDP, patch
from ddp_check.observer.values import (
    checksum,
    checksums,
    in_double_precision,
    mesh_dimensions,
    tensors_in,
)

SHARDED = {"FSDPModule", "FullyShardedDataParallel"}  # importing FSDP would take seconds
model_numbers = {}  # id of a module in a wrapped model -> the number of that model


class Forward(NamedTuple):
    """A call of a DDP model that a backward pass may follow."""

    model: int  # number of the model
    synced: bool  # whether its gradients will be reduced
    in_join: bool  # whether it is called inside join()


@patch(f"{DDP}.__init__")
def wrap(original, self, module, *args, **kwargs):
    """Report a new DDP model. For the drill world-size, let two runs start from equal weights."""
    number = len(state.wrapped)
    if TASK.scale:
        module.double()
    path = os.path.join(TASK.start, f"start{number}")  # its initial weights in another run
    if TASK.start and os.path.exists(path):
        module.load_state_dict(base.torch_load(path, weights_only=True))
    original(self, module, *args, **kwargs)
    if TASK.scale:
        save_for_checker(f"start{number}", module.state_dict())
    with harmless():
        model_numbers.update((id(part), number) for part in module.modules())
        state.wrapped.append(module)
        report(events.Wrap, names=[name for name, _ in module.named_parameters()])


def model_suffix(number):
    """Return the suffix for names of a wrapped model's parameters, or "" for the first model."""
    return f" of model {number + 1}" if number else ""


@patch(f"{DDP}.register_comm_hook")
def register_comm_hook(original, self, state, hook):
    """Report a hook that replaces DDP's way of averaging the gradients."""
    name = ask(lambda: f"{hook.__module__}.{hook.__qualname__}", default="")
    report(events.CommHook, name=name)
    return original(self, state, hook)


@patch(f"{DDP}.forward")
def forward(original, self, /, *args, **kwargs):
    """Note the inputs of a training call, and whether its gradients will be reduced."""
    state.in_forward = True
    with harmless():
        if torch.is_grad_enabled():
            call = Forward(
                model=model_numbers.get(id(self.module), -1),
                synced=self.require_backward_grad_sync,
                in_join=self._join_config.enable,
            )
            state.since_step.forwards.append(call)
            if self.module.training:
                note_inputs(self, args, kwargs)
    if TASK.scale:
        args, kwargs = in_double_precision((args, kwargs))
    try:
        return original(self, *args, **kwargs)
    finally:
        state.in_forward = False


@patch("torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad")
def zero_grad(original, self, *args, **kwargs):
    """Reset the count of reductions: the gradients are dropped, as after the first step of SAM."""
    state.since_step.reductions = 0
    return original(self, *args, **kwargs)


def note_inputs(_, args, kwargs):
    """Note a checksum of a model's training inputs. A sharded model calls this as a hook."""
    with harmless():
        if torch.is_grad_enabled():
            total = checksum(tensors_in([args, kwargs]), quick=True)
            state.since_step.inputs.append(total)


# ---------------------------------------------------------------- calls of modules


@hooks.register_module_forward_pre_hook
def enter_module(module, args):
    """Observe the call of any module."""
    if is_compiling():
        return  # torch.compile would make the hooks a part of the graph
    state.in_module += 1  # comes before the next return, because leave_module will subtract 1
    if is_recorded():
        return
    is_outermost = state.in_module == 1
    with harmless():
        if torch.is_grad_enabled():  # at any depth, because a model may be part of another one
            note_bypass(module)
            watch_sharded_inputs(module)
        elif is_outermost or is_wrapped(module):
            report_evaluation(module)


@functools.partial(hooks.register_module_forward_hook, always_call=True)
def leave_module(module, _, __):
    """Observe the end of a module's call."""
    if is_compiling():
        return
    state.in_module -= 1


def note_bypass(module):
    """Note a training call of a wrapped model, or of a part of it, that bypasses DDP."""
    number, bypasses = model_numbers.get(id(module)), state.since_step.bypasses
    if number is None or number in bypasses:
        return
    if state.in_forward or in_backward():  # checkpointing calls modules again in a backward pass
        return
    if any(value.requires_grad for value in module.parameters()):
        bypasses[number] = script_line()


def watch_sharded_inputs(module):
    """Note the inputs of the first sharded model that is called, from its second call on."""
    if SHARDED & {kind.__name__ for kind in type(module).__mro__} and is_first("sharded"):
        module.register_forward_pre_hook(note_inputs, with_kwargs=True)


def report_evaluation(module):
    """Report that a batch is evaluated, and once per pass that a wrapped model evaluates it."""
    if isinstance(module, DistributedDataParallel):
        return  # DDP will call the model inside it, which is then reported
    if state.batch_is_unevaluated:
        report(events.BatchEvaluated)
    state.batch_is_unevaluated = False
    if is_wrapped(module) and is_first("evaluated", id(module), state.passes):
        # If only a part is in training mode, that is intended, as for Monte Carlo dropout.
        noisy = [type(part).__name__ for part in module.modules() if is_noisy(part)]
        noisy_layer = noisy[0] if noisy and module.training else ""
        report(events.Evaluated, training=module.training, noisy=noisy_layer)


def is_wrapped(module):
    """Return whether a module is a wrapped model. The script may define `==`, so this uses `is`."""
    return any(module is model for model in state.wrapped)


def is_noisy(module):
    """Return whether a module is in training mode and returns something else because of it."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    drops_out = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and (drops_out or norm)


# ---------------------------------------------------------------- the end


def describe_models():
    """Report checksums of the final weights, and save those of rank 0, unless they are sharded."""
    if mesh_dimensions(state.parameters.values()) or not is_first("final"):
        return
    models = [dict(module.named_parameters()) for module in state.wrapped]
    if not models:
        values = enumerate(state.parameters.values())
        models = [{f"{events.PARAMETER}{number}": value for number, value in values}]
    for weights in models:
        report(events.Final, weights=checksums(weights))
    if any(models):
        save_for_checker("final", [module.state_dict() for module in state.wrapped] or models)


@patch(f"{C10D}.destroy_process_group")
def destroy_process_group(original, group=None):
    """Report the weights before a rank leaves the process group."""
    if group in (None, torch.distributed.group.WORLD):
        with harmless():
            describe_models()
        time.sleep(0.05)  # lets gloo's threads drop their work; otherwise, freeing DDP could hang
    return original(group)
