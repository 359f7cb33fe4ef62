"""Observes the steps of optimizers, schedulers and GradScalers."""

import math
import re
import sys
import time
import traceback
from collections import Counter

import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers

from ddp_check import events
from ddp_check.observer.base import (
    TASK,
    SinceStep,
    ask,
    harmless,
    report,
    save_for_checker,
    state,
)
from ddp_check.observer.group import after_gather
from ddp_check.observer.models import buffer_checksums, buffers_at_start, of_model, watched
from ddp_check.observer.patches import CLIP, SCALER, SCHEDULED, SCHEDULERS, patch
from ddp_check.observer.randomness import attribute_draws, attribute_to_script
from ddp_check.observer.values import checksums, is_finite, mesh_dimensions, quick_checksums
from ddp_check.protocol import STEPS

STATISTICS = r"(^|\.)(running_|num_batches_)\w+( of model \d+)?$"  # of normalization layers
BATCH_COUNT = "num_batches_tracked"  # of BatchNorm, which uses it only without a momentum
FEW = 1 << 10  # elements of a gradient that are looked at first
MAX_PROJECTED = 1 << 16  # elements of a parameter that enter a projection
STEP_WRAPPER = (optimizers.__file__, "wrapper")  # in which PyTorch calls the step of an optimizer

projecting = {}  # identity of a parameter -> the handle of its hook, in the first steps


@optimizers.register_optimizer_step_pre_hook
def enter_step(optimizer, args, kwargs):
    """Report a step before it is taken, while the gradients are there."""
    callers = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
    wrappers = [code for code in callers if (code.co_filename, code.co_name) == STEP_WRAPPER]
    state.in_step = len(wrappers)  # counted each time: after an exception, no step is left
    if state.in_step > 1 or "_init_optim_state" in {code.co_name for code in callers}:
        return  # the latter makes the state that a sharded checkpoint is loaded into
    if ask(float, getattr(optimizer, "found_inf", None), default=0):
        return  # a fused optimizer skips the step itself when a GradScaler tells it to
    state.steps += 1
    time.sleep(TASK.pause)
    with harmless:
        after_gather.stop()
        attribute_to_script()
        if TASK.scale and state.steps <= STEPS and state.wrapped:
            save_gradients()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        report_step(optimizer, closure is not None)
    state.since_step = SinceStep()
    state.new_pass = False


@optimizers.register_optimizer_step_post_hook
def leave_step(optimizer, args, kwargs):
    state.in_step -= 1


def save_gradients():
    """Keep the gradients of the first steps for the drill world-size."""
    gradients = [
        [(name, dense(value.grad)) for name, value in module.named_parameters()]
        for module in state.wrapped
    ]
    save_for_checker(f"step{state.steps}", gradients)


def dense(gradient):
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


class Optimized:
    """The parameters of an optimizer, by name."""

    def __init__(self, optimizer):
        owners = {  # identity of a parameter of a wrapped model -> its name, number of the model
            id(value): (f"{name}{of_model(number)}", number)
            for number, module in enumerate(state.wrapped)
            for name, value in module.named_parameters()
        }
        values = [value for group in optimizer.param_groups for value in group["params"]]
        state.parameters.update((id(value), value) for value in values)
        self.parameters = {}
        self.models = {}  # name of a parameter -> number of its model, if it is wrapped
        for at, value in enumerate(values):
            name, number = owners.get(id(value), (f"parameter {at}", None))
            self.parameters[name] = value
            if number is not None:
                self.models[name] = number
        self.gradients = {
            name: value.grad for name, value in self.parameters.items() if value.grad is not None
        }
        self.unwatched = [
            name
            for name in self.models
            if name in self.gradients and id(self.parameters[name]) not in watched
        ]
        self.sharded = mesh_dimensions(values)

    def not_finite(self, losses):
        """Return what is not finite: "loss", "gradient of NAME", or ""."""
        if not all(map(math.isfinite, losses)):
            return "loss"
        bad = (name for name, value in self.gradients.items() if not is_finite(value))
        return next((f"gradient of {name}" for name in bad), "")


def is_unused(value):
    """Return whether the losses of this rank have given this parameter no gradient."""
    skipped = id(value) in state.watched_for_use and id(value) not in state.since_step.used
    return value.grad is None or skipped


def report_step(optimizer, closure):
    """Report the step that an optimizer is about to take, with what happened since the last one."""
    wrappers = [reference() for reference in state.wrappers]
    since, optimized = state.since_step, Optimized(optimizer)
    parameters, gradients = optimized.parameters, optimized.gradients
    elements = sum(value.numel() for value in gradients.values())
    trained = {number for name, number in optimized.models.items() if name in gradients}
    bypassed = sorted(trained & since.bypasses.keys() - {call.model for call in since.forwards})
    report(
        events.Step,
        gradients=quick_checksums({name: value.grad for name, value in parameters.items()}),
        weights=checksums(parameters) if wants_weights() else None,
        rates=[float(group.get("lr", 0)) for group in optimizer.param_groups],
        losses=since.losses,
        divisors=since.divisors,
        means_over=since.means_over,
        loss_reduced=since.loss_reduced,
        backwards=since.backwards,
        **describe_projections(optimized),
        sample_count=since.sample_count,
        inputs=since.inputs,
        infinite=optimized.not_finite(since.losses),
        zero=not any(is_nonzero(value) for value in gradients.values()),
        unused=sum(value.requires_grad and is_unused(value) for value in parameters.values()),
        foreign=0 if optimized.sharded else len(parameters) - len(optimized.models),
        unwatched=optimized.unwatched,
        bypassed=[since.bypasses[number] for number in bypassed],
        sharded=optimized.sharded,
        has_state=bool(optimizer.state),
        closure=closure,
        synced=all(call.synced for call in since.forwards[-1:]),
        reductions=most_reductions(since.forwards),
        reduced=[total for total, _ in since.reduced],
        reduced_all=sum(count for _, count in since.reduced) >= elements,
        training=all(state.wrapped[number].training for number in optimized.models.values()),
        **describe_buffers(),
        random=since.draws,
        random_for_samples=since.draws_for_samples,
        joined=any(wrapper._join_config.enable for wrapper in wrappers if wrapper),
    )


def wants_weights():
    """Return whether this step reports its weights: seldom, as that takes time."""
    # Two steps in turn, as two optimizers may take turns: 1, 2, 3, 4, 5, 8, 9, 16, 17, ...
    number = state.steps
    is_power = not number & (number - 1) or not (number - 1) & (number - 2)
    return state.new_pass or not state.wrapped or is_power


def is_nonzero(gradient):
    some = gradient if gradient.is_sparse else gradient.flatten()[:FEW]
    return bool(some.any()) or bool(gradient.any())


def most_reductions(forwards):
    """Return how many backward passes reduced gradients, of the model with the most."""
    reduced = {(call.model, call.backwards) for call in forwards if call.synced}
    return max(Counter(model for model, _ in reduced).values(), default=0)


def describe_buffers():
    """Return checksums of the buffers, and the names of those that have changed."""
    sums = {}
    for number, module in enumerate(state.wrapped):
        sums |= buffer_checksums(module, number)
    changed = [name for name in sorted(sums) if sums[name] != buffers_at_start.get(name)]
    return {
        "buffers": {name: sums[name] for name in sums if not re.search(STATISTICS, name)},
        "buffers_changed": [name for name in changed if BATCH_COUNT not in name],
    }


# ---------------------------------------------------------------- projections of gradients


@patch("torch.optim.Optimizer.add_param_group")
def add_param_group(original, self, *args, **kwargs):
    """Watch the gradients that this rank computes, before anything reduces them."""
    result = original(self, *args, **kwargs)
    with harmless:
        attribute_draws()  # what was drawn before made a model
        for value in self.param_groups[-1]["params"]:
            whole = not mesh_dimensions([value])  # the slice of a sharded one would communicate
            if whole and value.requires_grad and value.is_leaf and id(value) not in projecting:
                projecting[id(value)] = value.register_hook(project_own)
    return result


def project_own(gradient):
    with harmless:
        if not gradient.is_sparse:
            state.since_step.projection += projection(gradient)


def projection(gradient):
    """Return a number to compare gradients by: a sum that weighs their elements differently."""
    elements = gradient.detach().flatten()[:MAX_PROJECTED].double().cpu()
    return float(elements @ torch.arange(len(elements), dtype=torch.double).cos())


def describe_projections(optimized):
    """Return the projections of this rank's gradients, and of those that the optimizer takes."""
    since, gradients = state.since_step, optimized.gradients.values()
    sparse = any(gradient.is_sparse for gradient in gradients)  # other elements on each rank
    if not projecting or since.loss_scaled or optimized.sharded or sparse:
        return {"own_gradient": None, "taken_gradient": None}
    taken = sum(map(projection, gradients))
    if state.steps >= STEPS:
        for handle in projecting.values():
            handle.remove()
        projecting.clear()
    return {"own_gradient": since.projection, "taken_gradient": taken}


# ---------------------------------------------------------------- GradScaler


@patch(f"{SCALER}.unscale_")
def unscale(original, self, *args, **kwargs):
    state.gradients_scaled = False
    return original(self, *args, **kwargs)


@patch(f"{SCALER}.step")
def step_scaled(original, self, *args, **kwargs):
    state.gradients_scaled = False
    steps = state.steps
    result = original(self, *args, **kwargs)
    with harmless:
        if self.is_enabled() and state.steps == steps:
            report(events.SkippedStep)
    state.since_step = SinceStep()
    return result


# ---------------------------------------------------------------- clipping, schedulers, states


@patch(f"{CLIP}.clip_grad_norm_", f"{CLIP}.clip_grad_value_")
def clip(original, *args, **kwargs):
    report(events.Clipped, scaled=state.gradients_scaled)
    return original(*args, **kwargs)


@patch("torch.nn.Module.load_state_dict", "torch.optim.Optimizer.load_state_dict")
def load_state_dict(original, self, *args, **kwargs):
    report(events.StateLoaded, wraps=len(state.wrapped))
    return original(self, *args, **kwargs)


@patch(*(f"{SCHEDULERS}.{name}.step" for name in SCHEDULED))
def step_scheduler(original, self, *args, **kwargs):
    """Report the step of a scheduler, not those that it lets others take."""
    if state.steps and not state.in_scheduler:
        is_plateau = isinstance(self, lr_scheduler.ReduceLROnPlateau)
        metric = (args[0] if args else kwargs.get("metrics")) if is_plateau else None
        report(events.Scheduled, scheduler=id(self), metric=ask(lambda: float(metric)))
    state.in_scheduler += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        state.in_scheduler -= 1
