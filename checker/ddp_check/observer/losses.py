"""Observes losses, and whether gradients of an earlier step are there when backward() begins."""

from ddp_check.observer.base import harmless, in_backward, state
from ddp_check.observer.patches import SCALER, patch
from ddp_check.observer.values import local_part, tensors_in

FEW, MAX_ELEMENTS = 3, 64  # of the first and last parameters; of each gradient


def note_losses(tensors):
    """Note the values of these losses, if they are single numbers."""
    losses = [tensor for tensor in tensors_in(tensors) if tensor.numel() == 1]
    state.since_step.losses += [loss.detach().float().item() for loss in losses]


@patch("torch.autograd.backward")
def backward(original, tensors, *args, **kwargs):
    """Note the losses of a backward pass, unless they were noted before they were scaled."""
    with harmless():
        is_inner = in_backward()  # that of reentrant checkpointing
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
        note_losses(outputs)
        state.gradients_scaled = self.is_enabled()
        state.since_step.losses_scaled += self.is_enabled()
    return original(self, outputs)


def gradients_are_left():
    """Return whether all parameters that an optimizer trains still have gradients.

    Some elements of a few of them say so: zeros, and None, are what zero_grad() leaves.
    """
    trained = [value for value in state.parameters.values() if value.requires_grad]
    some = [value.grad for value in (*trained[:FEW], *trained[-FEW:])]
    return bool(some) and all(
        grad is not None and bool(local_part(grad).flatten()[:MAX_ELEMENTS].any()) for grad in some
    )
