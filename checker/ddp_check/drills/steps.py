"""What drills ask of a run: its steps, its saves, and its final weights."""

import math
from itertools import chain

import torch

from ddp_check import events

DOING = (events.Step, events.Batch, events.PassBegun, events.Collective, events.Final)
SAVES = (events.Save, events.ShardedSave)
LOADS = (events.Load, events.ShardedLoad)


def steps_of(run):
    """Return the steps of the lowest rank."""
    return run.of_lowest_rank(events.Step)


def count_steps(found):
    return sum(isinstance(event, events.Step) for event in found)


def complete_saves(found):
    """Return the steps before each save that is complete: its rank has gone on since."""
    last = max((at for at, event in enumerate(found) if isinstance(event, DOING)), default=0)
    return [event.steps for event in found[:last] if isinstance(event, SAVES)]


def saved_steps(run):
    """Return the number of steps before the last complete save, or None without one."""
    return max(chain(*map(complete_saves, run.events_by_rank.values())), default=None)


def trains_on(found):
    """Return whether steps have followed a complete save."""
    return count_steps(found) > min(complete_saves(found), default=math.inf)


def draws_numbers(run):
    """Return whether random numbers are drawn between steps, as for dropout."""
    return any(step.random for step in run.all(events.Step))


def final_weights(run):
    """Return the final weights of rank 0's models: {(number of the model, name): tensor}."""
    path = run.folder / "final"
    models = torch.load(path, weights_only=True) if path.exists() else []
    return {
        (number, name): value
        for number, model in enumerate(models)
        for name, value in model.items()
        if isinstance(value, torch.Tensor)
    }


def differing(weights, others):
    """Return the names under which two runs have ended with other weights."""
    return [
        name
        for name in weights
        if name not in others or not torch.equal(weights[name], others[name])
    ]
