"""Observes models wrapped in DDP, their gradients, and optimizer steps."""

import functools
import os
import re
import time
import weakref
from collections import Counter, namedtuple

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_map_only

from ddp_check import events
from ddp_check.observer import base, values
from ddp_check.observer.base import TASK, first, reports, say, seen, watch, where
from ddp_check.observer.group import watch_no_lengths
from ddp_check.observer.values import batch_checksum, checksums, is_finite, meshes, tensors_in
from ddp_check.protocol import STEPS

inside = {}  # identity of a module in a wrapped model -> the number of that model
STATISTICS = r"(^|\.)(running_|num_batches_)[^.]*$"  # each rank's normalization keeps its own
SHORTER = (torch.FloatTensor, torch.BFloat16Tensor, torch.HalfTensor)  # than float64
SHARDED = {"FSDPModule", "FullyShardedDataParallel"}  # importing them would take seconds

# A forward call of DDP in training mode: how many backward passes came before it, and whether its
# gradients will be reduced
Forward = namedtuple("Forward", "model backwards synced")


@watch(DDP, "__init__")
def wrap(do, self, module, *args, **kwargs):
    number = len(seen.wrapped)
    if TASK.scale:
        module.double()
    path = os.path.join(TASK.start, f"start{number}")  # the weights it had in another run
    if TASK.start and os.path.exists(path):
        module.load_state_dict(base.torch_load(path, weights_only=True))
    do(self, module, *args, **kwargs)
    if TASK.scale:
        base.keep(f"start{number}", module.state_dict())
    inside.update((id(part), number) for part in module.modules())
    seen.wrapped.append(module)
    seen.wrappers.append(weakref.ref(self))
    names = [name for name, _ in module.named_parameters()]
    alone = [one for one in module.modules() if not isinstance(one, nn.SyncBatchNorm)]
    say(events.Wrap, names=names, buffers=any([*one.buffers(recurse=False)] for one in alone))


@watch(DDP, "forward")
def forward(do, self, *args, **kwargs):
    seen.in_forward = True
    if torch.is_grad_enabled() and self.module.training:
        number = inside.get(id(self.module), -1)
        seen.forwards.append(Forward(number, seen.backwards, self.require_backward_grad_sync))
        seen.inputs.append(batch_checksum([args, kwargs]))
    if TASK.scale:
        args, kwargs = tree_map_only(SHORTER, torch.Tensor.double, (args, kwargs))
    before = torch.get_rng_state()
    try:
        return do(self, *args, **kwargs)
    finally:
        seen.in_forward = False
        seen.dropout |= not before.equal(torch.get_rng_state())


@hooks.register_module_forward_pre_hook
def enter(module, _):
    """Report a training call that bypasses DDP, and the first call of an evaluation in a pass."""
    seen.depth += 1
    if torch.is_grad_enabled():
        in_backward = torch._C._current_graph_task_id() >= 0  # where checkpoints call modules again
        beside = module.training and id(module) in inside and not (seen.in_forward or in_backward)
        trains = beside and any(value.requires_grad for value in module.parameters())
        if trains and first("bypassed", inside[id(module)]):
            say(events.Bypass, where(outside=inside), model=inside[id(module)])
        if SHARDED & {one.__name__ for one in type(module).__mro__} and first("sharded"):
            module.register_forward_pre_hook(enter_sharded, with_kwargs=True)
    elif module in seen.wrapped or (seen.depth == 1 and not isinstance(module, DDP)):
        if seen.fresh:
            say(events.Looked)
        seen.fresh = False
        evaluated(module)


@functools.partial(hooks.register_module_forward_hook, always_call=True)
def leave(module, _, __):
    seen.depth -= 1


def enter_sharded(module, args, kwargs):
    if torch.is_grad_enabled():
        seen.inputs.append(batch_checksum([args, kwargs]))


def evaluated(module):
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if state and not meshes(state.values()) and first("evaluated", id(module), seen.passes):
        say(
            events.Evaluated,
            model=type(module).__name__,
            steps=seen.steps,
            values=checksums(state),
            noisy=next((type(part).__name__ for part in module.modules() if is_noisy(part)), ""),
            wrapped=module in seen.wrapped,
            number=seen.passes,
        )


def is_noisy(module):
    """Return whether a module is in training mode, and its result depends on that."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    drops_out = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and (drops_out or norm)


@watch(torch.autograd, "backward")
def backward(do, tensors, *args, **kwargs):
    seen.backwards += 1
    if not seen.scaled:
        note_losses(tensors)
    return do(tensors, *args, **kwargs)


def note_losses(tensors):
    """Remember the values of these losses, if they are single numbers."""
    losses = [one for one in tensors_in(tensors) if one.numel() == 1]
    seen.losses += [one.detach().float().item() for one in losses]


@watch(torch.amp.GradScaler, "scale")
def scale(do, self, outputs):
    note_losses(outputs)
    seen.scaled = self.is_enabled()
    return do(self, outputs)


@watch(torch.amp.GradScaler, "unscale_", "step")
def unscale(do, self, *args, **kwargs):
    seen.scaled = False
    result = do(self, *args, **kwargs)
    if do.__name__ == "step":  # the scaler may skip that of the optimizer
        forget()
    return result


for name in ("clip_grad_norm_", "clip_grad_value_"):
    reports(events.Clipped, lambda *_: {"scaled": seen.scaled}, nn.utils.clip_grad, name)
for owner in (nn.Module, optimizers.Optimizer):
    reports(events.StateLoaded, lambda *_: {"wraps": len(seen.wrapped)}, owner, "load_state_dict")
for owner in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
    reports(events.Scheduled, lambda *_: seen.steps and {}, owner, "step")


@optimizers.register_optimizer_step_pre_hook
def step(optimizer, args, kwargs):
    seen.in_step += 1
    if seen.in_step > 1:
        return
    seen.steps += 1
    watch_no_lengths()
    if TASK.scale and seen.steps <= STEPS and seen.wrapped:
        models = [module.named_parameters() for module in seen.wrapped]
        base.keep(f"step{seen.steps}", [[(name, one.grad) for name, one in of] for of in models])
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    report_step(optimizer, closure is not None)
    forget()
    seen.new_pass = False


@optimizers.register_optimizer_step_post_hook
def stepped(optimizer, args, kwargs):
    seen.in_step -= 1


def forget():
    """Begin to collect anew what belongs to a step."""
    seen.forwards, seen.inputs, seen.losses, seen.by_hand = [], [], [], []
    seen.samples = 0


def report_step(optimizer, closure):
    more = " of model {}" if len(seen.wrapped) > 1 else ""
    owners = {  # the name of each parameter of the wrapped models, and the number of its model
        id(value): (name + more.format(at + 1), at)
        for at, module in enumerate(seen.wrapped)
        for name, value in module.named_parameters()
    }
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    seen.loose.update((id(value), value) for value in parameters)
    owned = [owners.get(id(value), (f"parameter {at}", -1)) for at, value in enumerate(parameters)]
    named = {name: value for (name, _), value in zip(owned, parameters)}
    gradients = {name: value.grad for name, value in named.items() if value.grad is not None}
    trained = {at for name, at in owned if at >= 0 and name in gradients}
    infinite = (f"gradient of {name}" for name, value in gradients.items() if not is_finite(value))
    buffers = [one for module in seen.wrapped for one in module.named_buffers()]
    finite = all(loss - loss == 0 for loss in seen.losses)
    reduced = {(call.model, call.backwards) for call in seen.forwards if call.synced}
    size, sharded = sum(value.numel() for value in gradients.values()), meshes(parameters)
    say(
        events.Step,
        gradients=checksums({name: value.grad for name, value in named.items()}),
        weights=checksums(named) if seen.new_pass or not seen.wrapped else None,
        rates=[float(group.get("lr", 0)) for group in optimizer.param_groups],
        losses=seen.losses,
        samples=seen.samples,
        inputs=seen.inputs,
        infinite=next(infinite, "") if finite else "loss",
        zero=not any(value.any() for value in gradients.values()),
        unused=sum(value.grad is None and value.requires_grad for value in parameters),
        foreign=0 if sharded else sum(at < 0 for _, at in owned),
        bypassed=sorted(trained - {call.model for call in seen.forwards}),
        sharded=sharded,
        has_state=bool(optimizer.state),
        closure=closure,
        synced=all(call.synced for call in seen.forwards[-1:]),
        reductions=max(Counter(model for model, _ in reduced).values(), default=0),
        reduced=[one for one, _ in seen.by_hand],
        reduced_all=sum(n for _, n in seen.by_hand) >= size,
        training=all(seen.wrapped[at].training for _, at in owned if at >= 0),
        buffers={at: batch_checksum(one) for at, one in buffers if not re.search(STATISTICS, at)},
        random=values.checksum([torch.get_rng_state()]),
        dropout=seen.dropout,
        joined=any(one() is not None and one()._join_config.enable for one in seen.wrappers),
    )


def describe_models():
    """Report checksums of the final weights, and save those of rank 0."""
    if meshes(seen.loose.values()) or not first("final"):
        return
    loose = {f"parameter {at}": value for at, value in enumerate(seen.loose.values())}
    weights = [dict(module.named_parameters()) for module in seen.wrapped] or [loose]
    for named in weights:
        say(events.Final, weights=checksums(named), finite=all(map(is_finite, named.values())))
    if any(weights):
        base.keep("final", [module.state_dict() for module in seen.wrapped] or weights)


@watch(c10d, "destroy_process_group")
def destroy_process_group(do, *args, **kwargs):
    describe_models()
    say(events.Leave, live_wrappers=sum(one() is not None for one in seen.wrappers))
    time.sleep(0.05)  # gloo's threads forget their last work, or freeing a DDP model could hang
    return do(*args, **kwargs)
