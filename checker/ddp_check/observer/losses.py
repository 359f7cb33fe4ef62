"""Observes losses: their values, and what they are divided by before their backward pass."""

from ddp_check.observer.base import harmless, in_backward, state
from ddp_check.observer.patches import SCALER, patch
from ddp_check.observer.values import tensors_in


def note_losses(tensors):
    """Note the values of these losses, if they are single numbers, and how they were computed."""
    losses = [tensor for tensor in tensors_in(tensors) if tensor.numel() == 1]
    state.since_step.losses += [loss.detach().float().item() for loss in losses]


@patch("torch.autograd.backward")
def backward(original, tensors, *args, **kwargs):
    """Note the losses of a backward pass, unless they were noted before they were scaled."""
    with harmless():
        is_inner = in_backward()  # that of reentrant checkpointing
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
