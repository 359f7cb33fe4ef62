"""Observes models wrapped in DDP, their gradients, and optimizer steps."""

import functools
import os
import sys
import weakref
from collections import Counter, namedtuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers

from ddp_check import events
from ddp_check.observer import report
from ddp_check.observer.lengths import watch_no_lengths
from ddp_check.observer.report import TASK, report_calls, say, seen, this_rank, watch, where
from ddp_check.observer.values import batch_checksum, checksums, is_finite, meshes, random_state
from ddp_check.protocol import STEPS

inside = {}  # identity of a module in a wrapped model -> the number of that model
EMPTY = torch.empty(0)
STATISTICS = ("running_", "num_batches_")  # each rank's normalization keeps its own


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
        module.load_state_dict(report.torch_load(path, weights_only=True))
    seen.in_collective += 1
    do(self, module, *args, **kwargs)
    seen.in_collective -= 1
    if TASK.scale and this_rank() == 0:
        report.keep(f"start{number}", module.state_dict())
    inside.update((id(part), number) for part in module.modules())
    seen.wrapped.append(module)
    seen.wrappers.append(weakref.ref(self))
    alone = [part for part in module.modules() if not isinstance(part, nn.SyncBatchNorm)]
    say(
        events.Wrap,
        shapes=[[name, list(value.shape)] for name, value in module.named_parameters()],
        buffers=sum(len([*part.buffers(recurse=False)]) for part in alone),
    )


@watch(DDP, "forward")
def forward(do, self, *args, **kwargs):
    seen.in_forward = True
    if torch.is_grad_enabled() and self.module.training:
        number = inside.get(id(self.module), -1)
        seen.forwards.append(Forward(number, seen.backwards, self.require_backward_grad_sync))
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


def doubled(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


@hooks.register_module_forward_pre_hook
def enter(module, _):
    """Report a training call that bypasses DDP, and the first call of an evaluation in a pass."""
    seen.depth += 1
    if torch.is_grad_enabled():
        if module.training and id(module) in inside and not (seen.in_forward or seen.in_backward):
            bypassed(module)
    elif is_wrapped(module) or (seen.depth == 1 and not isinstance(module, DDP)):
        if seen.fresh:
            say(events.Looked)
        seen.fresh = False
        evaluated(module)


@functools.partial(hooks.register_module_forward_hook, always_call=True)
def leave(module, _, __):
    seen.depth -= 1


def is_wrapped(module):
    return any(module is wrapped for wrapped in seen.wrapped)


def bypassed(module):
    number = inside[id(module)]
    known = (number, "bypass") in seen.evaluated
    if not known and any(value.requires_grad for value in module.parameters()):
        parts = {id(part) for part in seen.wrapped[number].modules()}
        seen.evaluated.add((number, "bypass"))
        say(events.Bypass, where(outside=parts), model=number)


def evaluated(module):
    key = id(module), seen.passes
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if key in seen.evaluated or not state or meshes(state.values()):
        return
    seen.evaluated.add(key)
    say(
        events.Evaluated,
        model=type(module).__name__,
        steps=seen.steps,
        values=dict(zip(state, checksums(state.values()))),
        noisy=next((type(part).__name__ for part in module.modules() if is_noisy(part)), ""),
        wrapped=is_wrapped(module),
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


@watch(torch.amp.GradScaler, "unscale_", "step")
def unscale(do, self, *args, **kwargs):
    before = seen.steps
    seen.scaled = False
    result = do(self, *args, **kwargs)
    if do.__name__ == "step" and seen.steps == before:
        say(events.StepSkipped)
        forget()
    return result


def scheduled(*_):
    return seen.steps and {"steps": seen.steps}


def state_loaded(*_):
    return not TASK.start and {"wraps": len(seen.wrapped)}


CLIP = "clip_grad_norm_ clip_grad_value_"
report_calls(nn.utils.clip_grad, CLIP, events.Clipped, lambda *_: {"scaled": seen.scaled})
for owner in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
    report_calls(owner, "step", events.Scheduled, scheduled)
for owner in (nn.Module, optimizers.Optimizer):
    report_calls(owner, "load_state_dict", events.StateLoaded, state_loaded)


@watch(Join, "__enter__", "__exit__")
def join(do, self, *args):
    seen.joined = True
    result = do(self, *args)
    seen.joined = do.__name__ == "__enter__"
    return result


@optimizers.register_optimizer_step_pre_hook
def step(optimizer, args, kwargs):
    seen.in_step += 1
    if seen.in_step > 1:
        return
    seen.steps += 1
    watch_no_lengths()
    theirs = {id(value): value for group in optimizer.param_groups for value in group["params"]}
    seen.loose.update(theirs)
    if TASK.scale and this_rank() == 0 and seen.steps <= STEPS and seen.wrapped:
        models = [module.named_parameters() for module in seen.wrapped]
        kept = [[(name, value.detach(), value.grad) for name, value in of] for of in models]
        report.keep(f"step{seen.steps}", kept)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    report_step(optimizer, theirs, closure is not None)
    forget()
    seen.new_pass = False


@optimizers.register_optimizer_step_post_hook
def stepped(optimizer, args, kwargs):
    seen.in_step -= 1


def forget():
    """Begin to collect anew what belongs to a step."""
    seen.forwards, seen.inputs, seen.losses, seen.by_hand = [], [], [], []
    seen.samples = 0


def names_of(theirs):
    """Return the names of these parameters: {identity: name}."""
    names = {key: f"parameter {number}" for number, key in enumerate(theirs)}
    for module in seen.wrapped:
        names.update((id(value), name) for name, value in module.named_parameters())
    return names


def changed_buffers():
    """Return checksums of the buffers that have changed since the last step: {name: checksum}."""
    known, named = seen.buffers, [one for of in seen.wrapped for one in of.named_buffers()]
    named = [one for one in named if not one[0].rpartition(".")[2].startswith(STATISTICS)]
    seen.buffers = {name: batch_checksum(value) for name, value in named}
    return {name: one for name, one in seen.buffers.items() if known.get(name) != one}


def infinite(gradients, names):
    """Return what is not finite: "loss", "gradient of …" or nothing."""
    if not all(loss - loss == 0 for loss in seen.losses):
        return "loss"
    bad = next((key for key, value in gradients.items() if not is_finite(value)), None)
    return "" if bad is None else f"gradient of {names[bad]}"


def report_step(optimizer, theirs, closure):
    """Report the step of an optimizer that changes these parameters."""
    parameters = theirs.values()
    gradients = {key: value.grad for key, value in theirs.items() if value.grad is not None}
    parts = [{id(value) for value in module.parameters()} for module in seen.wrapped]
    called = {call.model for call in seen.forwards}
    reduced = {(call.model, call.backwards) for call in seen.forwards if call.synced}
    sharded = meshes(parameters)
    if sharded:
        watch_sharded()
    names = names_of(theirs)
    known, seen.names = seen.names, [names[key] for key in theirs]
    each = bool(seen.new_pass or not seen.wrapped)
    size = sum(value.numel() for value in gradients.values())
    say(
        events.Step,
        names=seen.names if seen.names != known else [],
        gradients=checksums(EMPTY if one.grad is None else one.grad for one in parameters),
        weights=checksums(parameters) if each else None,
        rates=[float(group.get("lr", 0)) for group in optimizer.param_groups],
        losses=seen.losses,
        samples=seen.samples,
        infinite=infinite(gradients, names),
        zero=not any(value.any() for value in gradients.values()),
        unused=sum(value.grad is None and value.requires_grad for value in parameters),
        foreign=0 if sharded else len(theirs.keys() - set().union(*parts)),
        bypassed=[
            at for at, keys in enumerate(parts) if at not in called and gradients.keys() & keys
        ],
        sharded=sharded,
        state=bool(optimizer.state),
        closure=closure,
        synced=all(call.synced for call in seen.forwards[-1:]),
        reductions=max(Counter(model for model, _ in reduced).values(), default=0),
        by_hand=[[one for one, _ in seen.by_hand], sum(n for _, n in seen.by_hand) >= size],
        training=all(
            module.training for module, keys in zip(seen.wrapped, parts) if theirs.keys() & keys
        ),
        buffers=changed_buffers(),
        broadcasts=any(one() is not None and one().broadcast_buffers for one in seen.wrappers),
        random=random_state(),
        dropout=seen.dropout,
        inputs=seen.inputs,
        joined=seen.joined,
    )


@functools.cache
def watch_sharded():
    """Watch what enters models that FSDP shards. It takes seconds to import: they have done so."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    @watch(FSDPState, "_root_pre_forward")
    @watch(FullyShardedDataParallel, "forward")
    def forward(do, self, *args, **kwargs):
        old = isinstance(self, FullyShardedDataParallel)
        is_root = self._is_root if old else self._state_ctx.iter_forward_root is None
        if is_root and torch.is_grad_enabled():
            seen.inputs.append(batch_checksum([args, kwargs] if old else args[1:]))
        return do(self, *args, **kwargs)


def describe_models():
    """Report checksums of the final weights, and save those of rank 0."""
    seen.described = True
    if meshes(seen.loose.values()):
        return
    models = [module.state_dict() for module in seen.wrapped]
    if not models and seen.loose:
        models = [{f"parameter {at}": value for at, value in enumerate(seen.loose.values())}]
    for weights in [[*m.parameters()] for m in seen.wrapped] or [list(seen.loose.values())]:
        say(events.Final, weights=checksums(weights), finite=all(map(is_finite, weights)))
    if models and this_rank() == 0:
        report.keep("final", models)
