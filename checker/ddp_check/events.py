"""What the observer reports: a dataclass for each kind of event. Does not import PyTorch.

A process writes an event as a line of JSON, and the checker reads it again. Checksums are whole
numbers, equal if the values were equal bit for bit. One is 0 if there was nothing to sum, or it
could not be read, and None if it is not known.
"""

import json
from dataclasses import dataclass

PARAMETER = "parameter "  # and a number: the name of a parameter that is in no wrapped model


@dataclass(kw_only=True)
class Event:
    """Something that a process of the script did. Each subclass becomes a dataclass, too."""

    time: float = 0.0  # in seconds, of a clock that all processes share
    where: str = ""  # the line of the script, as "file:line"; "" if none of its lines is running

    def __init_subclass__(cls):
        dataclass(kw_only=True)(cls)

    def __str__(self):
        return json.dumps({"kind": type(self).__name__, **vars(self)}, default=str)


def read(line):
    """Return the event that is written on a line."""
    values = json.loads(line)
    return KINDS[values.pop("kind")](**values)


# ---------------------------------------------------------------- processes and their group


class Start(Event):
    """The process imported PyTorch."""

    rank: int | str | None = None  # as its launcher says


class Trouble(Event):
    """The observer could not look at something; the script has not noticed it."""

    error: str


class Join(Event):
    """It joined a process group."""

    rank: int


class Exit(Event):
    """It ends, and Python's atexit functions run."""

    modules: list[str]  # files in the script's folder that it has imported


class OtherMachine(Event):
    """It was told to meet the other ranks on another machine; they meet here instead."""

    host: str


class SigtermHandler(Event):
    """It set a handler for SIGTERM."""


# ---------------------------------------------------------------- communication


class Collective(Event):
    """The script, or a library on its behalf, calls a collective on all ranks."""

    name: str
    in_model: bool  # during a forward pass of DDP, or a backward pass
    elements: int  # of its largest tensor
    requires_gradient: bool  # an input does, so a loss may depend on the result
    # requires_gradient, and gradients are enabled: backward() cannot pass through the result
    cuts_gradient: bool


class Totalled(Event):
    """Numbers of all ranks were added up: they may count samples."""

    values: list[int]  # the results that are whole numbers, and their sum if that is one


# ---------------------------------------------------------------- data


class PassBegun(Event):
    """A pass over a DataLoader begins."""

    pass_number: int  # counts the passes of this process
    sample_count: int | None  # of the data set, if that is known
    batch_count: int | None  # to come, if that is known
    iterable: bool  # the data set is an IterableDataset: its samples have no index
    subset_checksum: int  # of the indices that a Subset keeps, or 0
    distributed: bool  # the sampler is a DistributedSampler
    shuffle: bool | None  # None: the sampler does not say
    dataset_checksum: int  # the same for equal data sets
    persistent: bool  # its workers stay for the next pass


class Batch(Event):
    """A DataLoader has returned a batch."""

    pass_number: int
    indices: list[int] | None  # as the sampler gave them
    base_indices: list[int] | None  # the same samples in the data set below all Subsets
    checksums: list[int] | None  # of each sample
    label_checksums: list[int] | None  # of the smallest part of each, if it has several


class PassEnded(Event):
    """A DataLoader has no more batches."""

    pass_number: int


class BatchEvaluated(Event):
    """A model is called without gradients, for the first time since a DataLoader's batch."""


class EpochSet(Event):
    """DistributedSampler.set_epoch is called."""

    value: int


class Drawn(Event):
    """Random numbers were drawn to make samples, by this generator for the first time in a pass."""

    source: str  # "torch", "random", "numpy", or "generator": the data set has one of its own
    state: int  # checksum of the generator's state before and after
    pass_number: int  # for a persistent worker, the first of its passes
    worker: int | None  # of the DataLoader, or None for the training process


# ---------------------------------------------------------------- models and optimizers


class Wrap(Event):
    """A model was wrapped in DistributedDataParallel."""

    names: list[str]  # of its parameters


class CommHook(Event):
    """A wrapped model gets a hook that reduces its gradients instead of DDP."""

    name: str  # of the hook, with its module


class Step(Event):
    """An optimizer is about to take a step.

    If two optimizers step after one backward pass, the second step has no losses and no inputs.
    """

    losses: list[float]  # whose backward pass came since the step before
    backwards: int  # backward passes since then
    sample_count: int  # of the batches that a DataLoader returned since then
    inputs: list[int]  # checksums of the batches that entered models since then

    rng: dict[str, int]  # checksum of the state of each global generator of random numbers
    gradients: dict[str, int]  # checksum of each parameter's gradient, 0 without one
    # Checksum of each parameter, in the first step of a pass and some others; without DDP, in each:
    weights: dict[str, int] | None
    rates: list[float]  # learning rate of each group of parameters
    # "gradient of NAME" if that is not finite, "loss" if a loss, too, is not, its cause; or "":
    infinite: str
    zero: bool  # all gradients are zero
    # Parameters that got into a model, or got a gradient, after DDP had wrapped it:
    unreduced: list[str]
    # Lines that call a wrapped model whose wrapper was not called, and which has gradients:
    bypassed: list[str]
    mesh_dimensions: int  # of the mesh that the parameters are sharded over, or 0
    has_state: bool  # the optimizer has taken a step before, or its state was loaded
    closure: bool  # step() was given one, which computes the gradients
    synced: bool  # the last forward pass of DDP asked for a reduction, or there was none
    reductions: int  # backward passes that reduced gradients, since the last zero_grad()
    stale: bool  # the gradients of the step before were still there when backward() began
    training: bool  # the wrapped models with these parameters, if any, are in training mode
    in_join: bool  # it is taken inside join()


class Clipped(Event):
    """Gradients are clipped."""

    scaled: bool  # a GradScaler's factor is in them


class Scheduled(Event):
    """A learning rate scheduler takes a step, after an optimizer has taken one."""

    metric: float | None  # that ReduceLROnPlateau gets


class StateLoaded(Event):
    """A model or an optimizer has loaded a state."""

    by_model: bool  # not by an optimizer
    wraps: int  # how many models had been wrapped before
    unknown: str  # the first name in the state, if the model has none of them; or ""


class Evaluated(Event):
    """A wrapped model is called without gradients, for the first time since a pass began."""

    training: bool  # the model is in training mode
    noisy: str  # a layer in training mode that then changes what it returns, or ""
    pass_number: int  # of the pass that gave the latest batch, or 0 if there was none


class Final(Event):
    """The weights of a model at the end."""

    weights: dict[str, int]  # checksum of each parameter


# ---------------------------------------------------------------- output and files


class Written(Event):
    """A file is opened for writing, not only to append to it, or gets its name."""

    path: str | None  # None: outside of the script's folder
    old_name: str = ""  # if it is renamed


class Save(Event):
    """torch.save has returned."""

    path: str | None
    keys: list[str]  # the first ones that begin with "module."
    wrapper: bool  # a model is saved as an object, with the wrapper around it
    steps: int  # of the optimizers before


class Load(Event):
    """torch.load is called by the script."""


KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}
