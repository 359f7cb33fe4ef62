"""Observes models wrapped in DDP, their gradients, and optimizer steps."""

import functools
import os
import sys
import weakref
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_check import events
from ddp_check.observer.report import (
    TASK,
    batch_checksum,
    checksum,
    checksums,
    keep,
    say,
    seen,
    this_rank,
    torch_load,
    watch,
    watch_no_lengths,
    where,
)
from ddp_check.protocol import STEPS

inside = {}  # identity of a module in a wrapped model -> the number of that model


class Forward(NamedTuple):
    """A forward call of DDP in training mode."""

    model: int
    backwards: int  # how many came before it
    synced: bool  # its gradients will be reduced


# ---------------------------------------------------------------- wrapped models


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
    inside.update((id(part), len(seen.wrapped)) for part in module.modules())
    seen.wrapped.append(module)
    seen.wrappers.append(weakref.ref(self))
    own = (one for one in module.modules() if not isinstance(one, nn.SyncBatchNorm))
    say(
        events.Wrap(
            shapes=[[name, list(value.shape)] for name, value in module.named_parameters()],
            weights=checksums(module.parameters()),
            buffers=sum(1 for one in own for _ in one.buffers(recurse=False)),
        )
    )


def load_start(module):
    """Give a model the weights with which it started in another run."""
    path = os.path.join(TASK.start, f"start{len(seen.wrapped)}")
    if os.path.exists(path):
        module.load_state_dict(torch_load(path, weights_only=True))


@watch(DDP, "forward")
def forward(do, self, *args, **kwargs):
    seen.in_forward = True
    if torch.is_grad_enabled() and self.module.training:
        number = inside.get(id(self.module), -1)
        call = Forward(number, seen.backwards, self.require_backward_grad_sync)
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


# ---------------------------------------------------------------- calls of any module


def depends_on_mode(module):
    """Return whether a module's result in training mode is another than in evaluation."""
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    drops_out = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return module.training and (drops_out or norm)


@register_module_forward_pre_hook
def enter(module, _):
    """Report a training call that bypasses DDP, and the first call of an evaluation in a pass."""
    seen.depth += 1
    if torch.is_grad_enabled():
        if module.training and id(module) in inside and not (seen.in_forward or seen.in_backward):
            bypassed(module)
    elif seen.depth == 1 or (seen.in_forward and inside.get(id(module)) is not None):
        evaluated(module)


@functools.partial(register_module_forward_hook, always_call=True)
def leave(module, _, __):
    seen.depth -= 1


def bypassed(module):
    number = inside[id(module)]
    if (number, "bypass") in seen.evaluated or not any(
        value.requires_grad for value in module.parameters()
    ):
        return
    parts = {id(part) for part in seen.wrapped[number].modules()}
    seen.evaluated.add((number, "bypass"))
    say(events.Bypass(model=number, where=where(outside=parts)))


def evaluated(module):
    if isinstance(module, DDP):
        return
    if seen.in_forward and not any(module is wrapped for wrapped in seen.wrapped):
        return
    key = id(module), seen.passes
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if key in seen.evaluated or not values or is_sharded(values.values()):
        return
    seen.evaluated.add(key)
    noisy = [type(part).__name__ for part in module.modules() if depends_on_mode(part)]
    say(
        events.Evaluated(
            model=type(module).__name__,
            steps=seen.steps,
            values=dict(zip(values, checksums(values.values()))),
            noisy=noisy[0] if noisy else "",
            wrapped=any(module is wrapped for wrapped in seen.wrapped),
            number=seen.passes,
        )
    )


# ---------------------------------------------------------------- from the loss to the step


@watch(torch.autograd, "backward")
def backward(do, tensors, *args, **kwargs):
    seen.backwards += 1
    if not seen.scaled:
        note_losses(tensors)
    seen.in_backward = True  # checkpoints call modules again
    try:
        return do(tensors, *args, **kwargs)
    finally:
        seen.in_backward = False


def note_losses(tensors):
    """Remember the values of these losses, if they are single numbers."""
    for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
            seen.losses.append(tensor.detach().float().item())


@watch(torch.amp.GradScaler, "scale")
def scale(do, self, outputs):
    note_losses(outputs)
    seen.scaled = self.is_enabled()
    return do(self, outputs)


@watch(torch.amp.GradScaler, "unscale_")
def unscale(do, self, optimizer):
    seen.scaled = False
    return do(self, optimizer)


@watch(torch.amp.GradScaler, "step")
def scaler_step(do, self, *args, **kwargs):
    before = seen.steps
    seen.scaled = False
    result = do(self, *args, **kwargs)
    if seen.steps == before:
        say(events.StepSkipped())
        forget()
    return result


def watch_clipping(name):
    @watch(nn.utils.clip_grad, name)
    def clip(do, *args, **kwargs):
        say(events.Clipped(scaled=seen.scaled))
        return do(*args, **kwargs)

    setattr(nn.utils, name, clip)


def watch_schedule(kind):
    @watch(kind, "step")
    def schedule(do, self, *args, **kwargs):
        result = do(self, *args, **kwargs)
        if seen.steps:
            say(events.Scheduled(steps=seen.steps))
        return result


def watch_loading(kind):
    @watch(kind, "load_state_dict")
    def load_state_dict(do, self, *args, **kwargs):
        if not TASK.start:
            say(events.StateLoaded(wraps=len(seen.wrapped)))
        return do(self, *args, **kwargs)


for name in ("clip_grad_norm_", "clip_grad_value_"):
    watch_clipping(name)
for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
    watch_schedule(kind)
for kind in (nn.Module, Optimizer):
    watch_loading(kind)


@watch(Join, "__enter__")
def join(do, self):
    seen.joined = True
    return do(self)


@watch(Join, "__exit__")
def joined(do, self, *args):
    result = do(self, *args)
    seen.joined = False
    return result


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
    watch_no_lengths()
    theirs = {id(value): value for group in optimizer.param_groups for value in group["params"]}
    seen.loose.update(theirs)
    if TASK.scale and this_rank() == 0 and seen.steps <= STEPS:
        keep_gradients()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    report_step(optimizer, theirs, closure is not None)
    forget()
    seen.new_pass = False


def forget():
    """Begin to collect anew what belongs to a step."""
    seen.forwards, seen.inputs, seen.losses, seen.by_hand = [], [], [], []
    seen.samples = 0


@register_optimizer_step_post_hook
def stepped(optimizer, args, kwargs):
    seen.in_step -= 1


def keep_gradients():
    """Save the parameters and gradients of all models before this step."""
    models = [module.named_parameters() for module in seen.wrapped]
    if models:
        values = [[(name, value.detach(), value.grad) for name, value in of] for of in models]
        keep(f"step{seen.steps}", values)


def names_of(theirs):
    """Return the names of these parameters: {identity: name}."""
    names = {key: f"parameter {number}" for number, key in enumerate(theirs)}
    for module in seen.wrapped:
        names.update((id(value), name) for name, value in module.named_parameters())
    return names


def is_finite(value):
    """Return whether all elements of a tensor are finite."""
    local = value.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    local = local.coalesce().values() if local.is_sparse else local
    if not local.numel() or not local.is_floating_point():
        return True
    return local.sum().isfinite().item() or local.isfinite().all().item()


def infinite(gradients, names):
    """Return what is not finite: "loss", "gradient of …" or nothing."""
    if not all(loss - loss == 0 for loss in seen.losses):
        return "loss"
    bad = next((key for key, value in gradients.items() if not is_finite(value)), None)
    return "" if bad is None else f"gradient of {names[bad]}"


def report_step(optimizer, theirs, closure):
    """Report the step of an optimizer that changes these parameters."""
    gradients = {key: value.grad for key, value in theirs.items() if value.grad is not None}
    parts = [[id(value) for value in module.parameters()] for module in seen.wrapped]
    mine = [number for number, keys in enumerate(parts) if any(key in theirs for key in keys)]
    called = {call.model for call in seen.forwards}
    sharded = is_sharded(theirs.values())
    if sharded:
        watch_sharded()
    names = names_of(theirs)
    known, seen.names = seen.names, [names[key] for key in theirs]
    each = bool(seen.new_pass or not seen.wrapped)
    size = sum(value.numel() for value in gradients.values())
    say(
        events.Step(
            names=seen.names if seen.names != known else [],
            gradients=checksums(
                value.grad if value.grad is not None else _EMPTY for value in theirs.values()
            ),
            weights=checksums(theirs.values()) if each else None,
            rates=[float(group.get("lr", 0)) for group in optimizer.param_groups],
            losses=seen.losses,
            samples=seen.samples,
            infinite=infinite(gradients, names),
            zero=not any(value.any() for value in gradients.values()),
            unused=sum(value.grad is None and value.requires_grad for value in theirs.values()),
            foreign=0 if sharded else len(theirs.keys() - {key for of in parts for key in of}),
            bypassed=[
                number
                for number in mine
                if number not in called and gradients.keys() & set(parts[number])
            ],
            sharded=sharded,
            meshes=meshes(theirs.values()),
            state=bool(optimizer.state),
            closure=closure,
            synced=all(call.synced for call in seen.forwards[-1:]),
            reductions=reductions(),
            by_hand=[[one for one, _ in seen.by_hand], sum(n for _, n in seen.by_hand) >= size],
            training=all(seen.wrapped[number].training for number in mine),
            random=random_state(),
            dropout=seen.dropout,
            inputs=seen.inputs,
            joined=seen.joined,
        )
    )


_EMPTY = torch.empty(0)


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
    for values in [[*m.parameters()] for m in seen.wrapped] or [list(seen.loose.values())]:
        finite = all(map(is_finite, values))
        say(events.Final(weights=checksums(values), finite=finite))
    if models and this_rank() == 0:
        keep("final", models)
