"""Observes models wrapped in DDP, their gradients, and optimizer steps."""

import functools
import os
import sys
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_check.observer.report import (
    TASK,
    batch_checksum,
    checksum,
    keep,
    say,
    seen,
    this_rank,
    torch_load,
    watch,
    watch_no_slices,
    where,
)
from ddp_check.protocol import STEPS


class Forward(NamedTuple):
    """A forward call of DDP in training mode."""

    model: int
    backwards: int  # how many came before it
    synced: bool  # its gradients will be reduced


@watch(DDP, "__init__")
def wrap(do, self, module, *args, **kwargs):
    if TASK.scale:
        module.double()
    if TASK.start:
        load_start(module)
    seen.in_collective += 1
    try:
        do(self, module, *args, **kwargs)
    finally:
        seen.in_collective -= 1
    if TASK.scale and this_rank() == 0:
        keep(f"start{len(seen.wrapped)}", module.state_dict())
    seen.wrapped.append(module)
    shapes = [[name, list(value.shape)] for name, value in module.named_parameters()]
    own = (one for one in module.modules() if not isinstance(one, torch.nn.SyncBatchNorm))
    buffers = sum(1 for one in own for _ in one.buffers(recurse=False))  # that ranks update apart
    weights = checksum(module.parameters())
    say("wrap", shapes=shapes, weights=weights, buffers=buffers, where=where())
    module.register_forward_pre_hook(called)  # no lambda: the script may pickle its model


def load_start(module):
    """Give a model the weights with which it started in another run."""
    path = os.path.join(TASK.start, f"start{len(seen.wrapped)}")
    if os.path.exists(path):
        module.load_state_dict(torch_load(path, weights_only=True))


def drops_out(module):
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def depends_on_mode(module):
    """Return whether a module's result in training mode is another than in evaluation."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    return module.training and (drops_out(module) or norm)


def called(module, _):
    """Report a training call that bypasses DDP, and the first call of an evaluation."""
    if not any(module is wrapped for wrapped in seen.wrapped):  # a copy, such as an average's
        return
    if module.training and not torch.is_grad_enabled() and seen.noisy != seen.passes:
        seen.noisy = seen.passes
        kinds = [type(part).__name__ for part in module.modules() if depends_on_mode(part)]
        if kinds:
            say("noisy", layer=kinds[0], number=seen.passes, where=where())
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
        seen.inputs.append(batch_checksum([args, kwargs]))
    if TASK.scale:
        args = [doubled(value) for value in args]
        kwargs = {name: doubled(value) for name, value in kwargs.items()}
    before = random_state()
    try:
        return do(self, *args, **kwargs)
    finally:
        seen.in_forward = False
        seen.dropout |= random_state() != before


def random_state():
    """Return a checksum of the state of PyTorch's random number generator."""
    return checksum([torch.get_rng_state()])


def doubled(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


@watch(torch.autograd, "backward")
def backward(do, *args, **kwargs):
    seen.backwards += 1
    return do(*args, **kwargs)


def reductions():
    """Return the largest number of times a model's gradients were reduced since the last step."""
    calls = {(call.model, call.backwards) for call in seen.forwards if call.synced}
    return max(Counter(model for model, _ in calls).values(), default=0)


@register_optimizer_step_pre_hook
def step(optimizer, args, kwargs):
    seen.in_step += 1
    if seen.in_step > 1:
        return
    seen.steps += 1
    watch_no_slices()
    theirs = {id(value): value for group in optimizer.param_groups for value in group["params"]}
    seen.loose.update(theirs)
    if TASK.scale and this_rank() == 0 and seen.steps <= STEPS:
        keep_gradients()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    report_step(optimizer, theirs, closure is not None)
    seen.forwards, seen.inputs, seen.new_pass = [], [], False


@register_optimizer_step_post_hook
def stepped(optimizer, args, kwargs):
    seen.in_step -= 1


def keep_gradients():
    """Save the parameters and gradients of all models before this step."""
    models = [module.named_parameters() for module in seen.wrapped]
    if models:
        values = [[(name, value.detach(), value.grad) for name, value in of] for of in models]
        keep(f"step{seen.steps}", values)


def report_step(optimizer, theirs, closure):
    """Report the step of an optimizer that changes these parameters."""
    gradients = [value.grad for value in theirs.values() if value.grad is not None]
    inside = {id(value) for module in seen.wrapped for value in module.parameters()}
    models = [
        module
        for module in seen.wrapped
        if any(id(value) in theirs for value in module.parameters())
    ]
    sharded = is_sharded(theirs.values())
    if sharded:
        watch_sharded()
    say(
        "step",
        gradients=checksum(gradients),
        weights=checksum(theirs.values()) if seen.new_pass else None,
        zero=not any(value.any() for value in gradients),
        unused=sum(value.grad is None and value.requires_grad for value in theirs.values()),
        foreign=0 if sharded else len(theirs.keys() - inside),
        sharded=sharded,
        meshes=meshes(theirs.values()),
        closure=closure,  # it computes the gradients later
        state=len(optimizer.state),
        inputs=seen.inputs,
        reductions=reductions(),
        synced=all(call.synced for call in seen.forwards[-1:]),
        training=all(module.training for module in models),
        random=random_state(),
        dropout=seen.dropout,
        where=where(),
    )


def is_sharded(values):
    """Return whether any of these are sharded by FSDP or tensor parallelism."""
    return any(hasattr(v, "to_local") or hasattr(v, "_fsdp_flattened") for v in values)


def meshes(values):
    """Return the largest number of dimensions of the meshes that these are spread over."""
    found = [v.device_mesh.ndim for v in values if hasattr(v, "device_mesh")]
    return max(found, default=0)


@functools.cache
def watch_sharded():
    """Watch what enters models that FSDP shards. It takes seconds to import: they have done so."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    @watch(FSDPState, "_root_pre_forward")
    def enter(do, self, module, args, kwargs):
        if self._state_ctx.iter_forward_root is None and torch.is_grad_enabled():
            seen.inputs.append(batch_checksum([args, kwargs]))
        return do(self, module, args, kwargs)

    @watch(FullyShardedDataParallel, "forward")
    def forward(do, self, *args, **kwargs):
        if self._is_root and torch.is_grad_enabled():
            seen.inputs.append(batch_checksum([args, kwargs]))
        return do(self, *args, **kwargs)


def describe_models():
    """Report checksums of the final weights, and save those of rank 0."""
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
