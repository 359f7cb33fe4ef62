"""Observes losses, and the steps of optimizers, schedulers and GradScalers."""

import math
import random
import sys
import time
import zlib

import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers

from ddp_check import events
from ddp_check.observer.base import (
    TASK,
    SinceStep,
    ask,
    callers,
    depth_of_steps,
    harmless,
    in_backward,
    report,
    save_for_checker,
    state,
)
from ddp_check.observer.models import model_suffix
from ddp_check.observer.patches import SCALER, patch
from ddp_check.observer.values import checksums, is_finite, local_part, mesh_dimensions, tensors_in
from ddp_check.protocol import STEPS

FEW, MAX_ELEMENTS = 3, 64  # number of first and last parameters, and of their elements, to check
SCHEDULERS = [  # schedulers that define a step() of their own
    "LRScheduler",
    "ReduceLROnPlateau",
    "ChainedScheduler",
    "SequentialLR",
    "CosineAnnealingWarmRestarts",
]


@optimizers.register_optimizer_step_pre_hook
def enter_step(optimizer, args, kwargs):
    """Report a step before it is taken, while the gradients are still there."""
    if depth_of_steps() > 1:
        return  # the step of another optimizer calls this one
    if "_init_optim_state" in {code.co_name for code in callers()}:
        return  # the step only creates the state into which a sharded checkpoint is loaded
    if ask(float, getattr(optimizer, "found_inf", None), default=0):
        return  # a fused optimizer skips this step, because a GradScaler has told it to
    state.steps += 1
    if TASK.pause:  # a drill that interrupts the script slows it down, to do so in the middle
        time.sleep(TASK.pause)
    with harmless():
        if TASK.scale and state.steps <= STEPS and state.wrapped:
            save_gradients()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        report_step(optimizer, closure is not None)
    state.since_step = SinceStep()
    state.no_step_in_pass = False


def save_gradients():
    """Save the gradients of the first steps for the drill world-size."""
    gradients = [
        [
            (name, None if value.grad is None else value.grad.to_dense())
            for name, value in module.named_parameters()
        ]
        for module in state.wrapped
    ]
    save_for_checker(f"step{state.steps}", gradients)


class OptimizerParameters:
    """The parameters of an optimizer by name, and which of them have gradients."""

    def __init__(self, optimizer):
        owners = {  # id of a parameter in a wrapped model -> its name, and the model's number
            id(value): (f"{name}{model_suffix(number)}", number)
            for number, module in enumerate(state.wrapped)
            for name, value in module.named_parameters()
        }
        values = [value for group in optimizer.param_groups for value in group["params"]]
        state.parameters.update((id(value), value) for value in values)
        self.by_name, self.gradients = {}, {}
        self.models = {}  # name of a parameter -> number of its model, if it is wrapped
        for position, value in enumerate(values):
            name, number = owners.get(id(value), (f"{events.PARAMETER}{position}", None))
            self.by_name[name] = value
            if value.grad is not None:
                self.gradients[name] = value.grad
            if number is not None:
                self.models[name] = number
        self.mesh_dimensions = mesh_dimensions(values)

    @property
    def bypassed(self):
        """The lines that directly call a model with gradients whose wrapper was not called."""
        since = state.since_step
        models = {self.models[name] for name in self.gradients if name in self.models}
        models -= {call.model for call in since.forwards}
        return [since.bypasses[number] for number in sorted(models & since.bypasses.keys())]

    def not_finite(self, losses):
        """Return where values that are not finite come from: "loss", "gradient of NAME", or ""."""
        for name, gradient in self.gradients.items():
            if not ask(is_finite, gradient, default=True):
                return f"gradient of {name}" if all(map(math.isfinite, losses)) else "loss"
        return ""  # even if a loss is infinite, because the script has cleaned its gradients


def report_step(optimizer, closure):
    """Report the step that an optimizer is about to take, with what happened since the last one."""
    since, parameters = state.since_step, OptimizerParameters(optimizer)
    gradients = parameters.gradients
    report(
        events.Step,
        losses=since.losses,
        sample_count=since.sample_count,
        inputs=since.inputs,
        rng=generator_states(),
        gradients=dict.fromkeys(parameters.by_name, 0) | checksums(gradients, quick=True),
        weights=checksums(parameters.by_name) if wants_weights() else None,
        rates=[ask(float, group.get("lr"), default=0.0) for group in optimizer.param_groups],
        infinite=parameters.not_finite(since.losses),
        zero=not any(bool(local_part(gradient).any()) for gradient in gradients.values()),
        bypassed=parameters.bypassed,
        mesh_dimensions=parameters.mesh_dimensions,
        has_state=bool(optimizer.state),
        closure=closure,
        synced=not since.forwards or since.forwards[-1].synced,
        reductions=since.reductions,
        stale=since.stale,
        training=all(state.wrapped[number].training for number in parameters.models.values()),
        in_join=any(call.in_join for call in since.forwards),
    )


def wants_weights():
    """Return whether this step reports its weights. With DDP, few do, to save time."""
    # Two consecutive steps out of 50, because two optimizers may take turns:
    is_early_or_rare = state.steps <= 5 or state.steps % 50 < 2
    return state.no_step_in_pass or not state.wrapped or is_early_or_rare


def generator_states():
    """Return a checksum of the state of each global generator: {source of random numbers: …}."""
    states = {"torch": zlib.crc32(torch.get_rng_state().numpy())}
    _, integers, _ = random.getstate()  # before Python 3.12, hash(None) differs between processes
    states["random"] = hash(integers)
    if numpy := sys.modules.get("numpy.random"):
        _, key, position, *_ = numpy.get_state()
        states["numpy"] = zlib.crc32(key.tobytes(), position)
    return states


# ---------------------------------------------------------------- losses


def note_losses(tensors):
    """Note the values of these losses, if they are single numbers."""
    losses = [tensor for tensor in tensors_in(tensors) if tensor.numel() == 1]
    state.since_step.losses += [loss.detach().float().item() for loss in losses]


@patch("torch.autograd.backward")
def backward(original, tensors, *args, **kwargs):
    """Note a backward pass: its losses, unless noted before scaling, and whether it reduces."""
    with harmless():
        is_inner = in_backward()  # reentrant checkpointing calls backward() inside backward()
        if not (state.since_step.backwards or is_inner):
            state.since_step.stale = gradients_are_left()
        calls = state.since_step.forwards
        state.since_step.reductions += bool(calls and calls[-1].synced and not is_inner)
        state.since_step.backwards += not is_inner
        if not (state.gradients_scaled or is_inner):
            note_losses(tensors)
    return original(tensors, *args, **kwargs)


@patch(f"{SCALER}.scale")
def scale(original, self, outputs):
    """Note losses before a GradScaler scales them."""
    with harmless():
        note_losses(outputs if self.is_enabled() else ())  # otherwise, backward() notes them
        state.gradients_scaled = self.is_enabled()
    return original(self, outputs)


def gradients_are_left():
    """Return whether all parameters that an optimizer trains still have gradients.

    This looks at some elements of a few gradients. After zero_grad(), they would be 0 or None.
    """
    trained = [value for value in state.parameters.values() if value.requires_grad]
    some = [value.grad for value in (*trained[:FEW], *trained[-FEW:])]
    return bool(some) and all(
        grad is not None and bool(local_part(grad).flatten()[:MAX_ELEMENTS].any()) for grad in some
    )


# ---------------------------------------------------------------- GradScaler


@patch(f"{SCALER}.unscale_")
def unscale(original, self, *args, **kwargs):
    """Note that the gradients are no longer multiplied by a GradScaler's factor."""
    state.gradients_scaled = False
    return original(self, *args, **kwargs)


@patch(f"{SCALER}.step")
def step_scaled(original, self, *args, **kwargs):
    """Attribute what follows to the next step, even if the GradScaler skips this one."""
    state.gradients_scaled = False
    result = original(self, *args, **kwargs)
    state.since_step = SinceStep()  # if the step was skipped, nothing else has reset it
    return result


# ---------------------------------------------------------------- clipping, schedulers, states


@patch("torch.nn.utils.clip_grad.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_value_")
def clip(original, *args, **kwargs):
    """Report that gradients are clipped."""
    report(events.Clipped, scaled=state.gradients_scaled)
    return original(*args, **kwargs)


@patch("torch.nn.Module.load_state_dict", "torch.optim.Optimizer.load_state_dict")
def load_state_dict(original, self, *args, **kwargs):
    """Report that a state was loaded."""
    result = original(self, *args, **kwargs)
    report(events.StateLoaded, wraps=len(state.wrapped))
    return result


@patch(*(f"torch.optim.lr_scheduler.{name}.step" for name in SCHEDULERS))
def step_scheduler(original, self, *args, **kwargs):
    """Report the step of a scheduler, but not the steps of schedulers that it calls."""
    in_constructor = any(code.co_name == "_initial_step" for code in callers())
    if state.steps and not (state.in_scheduler or in_constructor):
        is_plateau = isinstance(self, lr_scheduler.ReduceLROnPlateau)
        metric = (args[0] if args else kwargs.get("metrics")) if is_plateau else None
        report(events.Scheduled, metric=ask(float, metric))
    state.in_scheduler += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        state.in_scheduler -= 1
