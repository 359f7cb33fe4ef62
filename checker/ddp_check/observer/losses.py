"""Observes losses: their values, and what they are divided by before their backward pass."""

from ddp_check.observer.base import ask, harmless, in_backward, state
from ddp_check.observer.patches import SCALER, patch
from ddp_check.observer.values import tensors_in

MAX_NODES = 30  # of a graph that are searched for divisions
ALL_REDUCE = "_AllReduceBackward"  # that of torch.distributed.nn
# How the names of nodes begin that a single number passes, and whose inputs are such, too:
SCALAR_NODES = ("Div", "Mul", "Neg", "Add", "Sub", "ToCopy", "Clone", "Squeeze", "View", ALL_REDUCE)


def note_losses(tensors):
    """Note the values of these losses, if they are single numbers, and how they were computed."""
    losses = [tensor for tensor in tensors_in(tensors) if tensor.numel() == 1]
    state.since_step.losses += [loss.detach().float().item() for loss in losses]
    for loss in losses:
        note_graph(loss.grad_fn)


def note_graph(root):
    """Note what the graph of a loss divides by or takes a mean over, as `BetweenSteps` says."""
    since, nodes = state.since_step, [root]
    for node in nodes:  # the list grows below, until there are enough
        name = type(node).__name__
        if name == ALL_REDUCE:
            since.loss_reduced = True
        if elements := ask(elements_of, node, name):
            since.means_over.append(elements)
        if not name.startswith(SCALAR_NODES) or len(nodes) > MAX_NODES:
            continue  # of a mean, for instance, the input is no single number
        divisor = divisor_of(node, name)
        if divisor and divisor != 1:
            since.divisors.append(divisor)
        nodes += [inner for inner, _ in node.next_functions if inner]


def divisor_of(node, name):
    """Return what a node divides by: 2 for `loss / 2`, `loss * 0.5` and `0.5 * loss`, or None."""
    if name.startswith("Div"):
        return saved_number(node, "other")
    if name.startswith("Mul"):
        (first_operand, _), *_ = node.next_functions
        # `0.5 * loss` is computed as `loss * 0.5`. Of `tensor(0.5) * loss`, the first operand is
        # the factor, and has no graph.
        factor = saved_number(node, "self" if first_operand is None else "other")
        return 1 / factor if factor else None  # in float64, 1 / 0.1 is exactly 10
    return None


def elements_of(node, name):
    """Return over how many elements a node of the graph takes the mean, or None if it does not."""
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    # With weights of classes, the total weight is no number of elements.
    if name.startswith("NllLoss") and node._saved_reduction == 1 and node._saved_weight is None:
        return float(node._saved_total_weight)  # without those of ignore_index
    return None


def saved_number(node, operand):
    """Return the number that a node of the graph keeps as an operand, or None."""
    return ask(lambda: float(getattr(node, f"_saved_{operand}").detach()))


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
