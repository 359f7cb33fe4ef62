"""Observes models inside DDP, their gradients, and the steps of optimizers."""

from collections import Counter
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_check.observer.report import TASK, checksum, keep, say, seen, this_rank, watch, where
from ddp_check.protocol import STEPS


class Forward(NamedTuple):
    """A call of DDP in training."""

    model: int
    backwards: int  # how many there were before it
    synced: bool  # its gradients will be reduced


@watch(DDP, "__init__")
def wrap(do, self, module, *args, **kwargs):
    if TASK.scale:
        module.double()
    seen.in_collective += 1
    try:
        do(self, module, *args, **kwargs)
    finally:
        seen.in_collective -= 1
    seen.wrapped.append(module)
    shapes = [[name, list(value.shape)] for name, value in module.named_parameters()]
    buffers = sum(1 for _ in module.buffers())
    weights = checksum(module.parameters())
    say("wrap", shapes=shapes, weights=weights, buffers=buffers, where=where())
    module.register_forward_pre_hook(lambda module, _: called(module))


def called(module):
    """Report that a wrapped model is called without DDP in training, or first in an evaluation."""
    if module.training and torch.is_grad_enabled() and not seen.in_forward:
        say("bypass", where=where())
    if not module.training and seen.evaluated != seen.passes:
        seen.evaluated = seen.passes
        buffers = list(module.buffers())
        if buffers:
            say("evaluated", buffers=checksum(buffers), steps=seen.steps, where=where())


@watch(DDP, "forward")
def forward(do, self, *args, **kwargs):
    seen.in_forward = True
    if torch.is_grad_enabled() and self.module.training:
        call = Forward(id(self), seen.backwards, self.require_backward_grad_sync)
        seen.forwards.append(call)
    if TASK.scale:
        args = [doubled(value) for value in args]
        kwargs = {name: doubled(value) for name, value in kwargs.items()}
    try:
        return do(self, *args, **kwargs)
    finally:
        seen.in_forward = False


def doubled(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


@watch(torch.autograd, "backward")
def backward(do, *args, **kwargs):
    seen.backwards += 1
    return do(*args, **kwargs)


def reductions():
    """Return how often the gradients of a model were reduced since the last step."""
    calls = {(call.model, call.backwards) for call in seen.forwards if call.synced}
    return max(Counter(model for model, _ in calls).values(), default=0)


@register_optimizer_step_pre_hook
def step(optimizer, args, kwargs):
    seen.in_step += 1
    if seen.in_step > 1:
        return
    seen.steps += 1
    theirs = {id(value): value for group in optimizer.param_groups for value in group["params"]}
    seen.loose.update(theirs)
    if TASK.scale and this_rank() == 0 and seen.steps <= STEPS:
        keep_gradients()
    report_step(theirs, closure=len(args) > 1 or kwargs.get("closure") is not None)
    seen.forwards, seen.new_pass = [], False


@register_optimizer_step_post_hook
def stepped(optimizer, args, kwargs):
    seen.in_step -= 1


def keep_gradients():
    """Keep the parameters and gradients of all models before this step."""
    models = [module.named_parameters() for module in seen.wrapped]
    if models:
        values = [[(name, value.detach(), value.grad) for name, value in of] for of in models]
        keep(f"step{seen.steps}", values)


def report_step(theirs, closure):
    """Report the step of an optimizer that changes these parameters."""
    gradients = [value.grad for value in theirs.values() if value.grad is not None]
    inside = {id(value) for module in seen.wrapped for value in module.parameters()}
    models = [
        module
        for module in seen.wrapped
        if any(id(value) in theirs for value in module.parameters())
    ]
    sharded = is_sharded(theirs.values())
    say(
        "step",
        gradients=checksum(gradients),
        weights=checksum(theirs.values()) if seen.new_pass else None,
        zero=not any(value.any() for value in gradients),
        unused=sum(value.grad is None and value.requires_grad for value in theirs.values()),
        foreign=0 if sharded else len(theirs.keys() - inside),
        sharded=sharded,
        closure=closure,  # which computes the gradients, later
        reductions=reductions(),
        synced=all(call.synced for call in seen.forwards[-1:]),
        training=all(module.training for module in models),
        random=checksum([torch.get_rng_state()]),
        where=where(),
    )


def is_sharded(values):
    """Return whether these are parameters of FSDP or tensor parallelism."""
    return any(hasattr(v, "to_local") or hasattr(v, "_fsdp_flattened") for v in values)


def describe_models():
    """Report the weights that the models end with, and keep those of rank 0."""
    seen.described = True
    if is_sharded(seen.loose.values()):
        return
    models = [module.state_dict() for module in seen.wrapped]
    if not models and seen.loose:
        values = seen.loose.values()
        models = [{f"parameter {number}": value for number, value in enumerate(values)}]
    for values in [module.parameters() for module in seen.wrapped] or [seen.loose.values()]:
        say("final", weights=checksum(values), steps=seen.steps)
    if models and this_rank() == 0:
        keep("final", models)
