"""The events that the observer reports, as dataclasses. This module does not import PyTorch.

A process of the script writes an event as a line of JSON, which the checker reads. Checksums are
whole numbers. They are equal if the values were equal bit for bit. A checksum is 0 if the values
were empty or could not be read, and None if it is not known.
"""

import json
from dataclasses import dataclass

PARAMETER = "parameter "  # prefix of the name of a parameter that belongs to no wrapped model


@dataclass(kw_only=True)
class Event:
    """Something that a process of the script did. Each subclass becomes a dataclass, too."""

    time: float = 0.0  # seconds on a clock that all processes share
    where: str = ""  # line of the script, as "file:line"; "" if none of its lines is running

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

    rank: int | str | None = None  # rank that the launcher has given to the process


class Trouble(Event):
    """The observer failed to look at something, which does not affect the script."""

    error: str


class Join(Event):
    """The process joined a process group."""

    rank: int


class Exit(Event):
    """The process ends, and Python's atexit functions run."""


class OtherMachine(Event):
    """The script names another machine for the ranks to meet on; they meet on this one instead."""

    host: str


class SigtermHandler(Event):
    """The script set a handler for SIGTERM."""


# ---------------------------------------------------------------- communication


class Collective(Event):
    """The script, or a library on its behalf, calls a collective on all ranks."""

    name: str
    in_model: bool  # whether it is called during a forward pass of DDP or a backward pass
    elements: int  # number of elements in its largest tensor
    requires_gradient: bool  # whether an input requires a gradient; a loss may then use the result
    # Whether backward() does not go through the call, although gradients are required and enabled:
    cuts_gradient: bool


class Totalled(Event):
    """Numbers of all ranks were added up. They may be counts of samples."""

    values: list[int]  # results that are whole numbers, and the sum of all results if it is whole


# ---------------------------------------------------------------- data


class PassBegun(Event):
    """A pass over a DataLoader begins."""

    pass_number: int  # number of this pass within its process, counted from 1
    sample_count: int | None  # number of samples in the data set, if that is known
    batch_count: int | None  # number of batches to come, if that is known
    iterable: bool  # whether the data set is an IterableDataset, whose samples have no index
    subset_checksum: int  # checksum of the indices that a Subset keeps, or 0 without a Subset
    distributed: bool  # whether the sampler is a DistributedSampler
    shuffle: bool | None  # whether the sampler shuffles, or None if it does not say
    dataset_checksum: int  # checksum that is the same for equal data sets
    persistent: bool  # whether the DataLoader keeps its workers for the next pass


class Batch(Event):
    """A DataLoader has returned a batch."""

    pass_number: int
    indices: list[int] | None  # indices of its samples in the data set inside all Subsets
    checksums: list[int] | None  # checksum of each sample
    label_checksums: list[int] | None  # checksum of each sample's smallest part, if it has several


class PassEnded(Event):
    """A DataLoader has no more batches."""

    pass_number: int


class BatchEvaluated(Event):
    """A model is called without gradients, for the first time since the last batch was returned."""


class EpochSet(Event):
    """DistributedSampler.set_epoch is called."""

    value: int


class Drawn(Event):
    """A random number generator was used to make samples, for the first time in a pass."""

    source: str  # "torch", "random", "numpy", or "generator" if it belongs to the data set
    state: int  # checksum of the generator's states before and after its use
    pass_number: int  # number of the pass; in a persistent worker, that of its first pass
    worker: int | None  # number of the DataLoader's worker, or None in the training process


class LineDrew(Event):
    """In the drill world-size, a line that trains has used a random number generator."""

    source: str  # "torch", "random" or "numpy", or the id of the script's own torch.Generator


# ---------------------------------------------------------------- models and optimizers


class Wrap(Event):
    """A model was wrapped in DistributedDataParallel."""

    names: list[str]  # names of its parameters


class CommHook(Event):
    """A wrapped model gets a hook that reduces its gradients in DDP's place."""

    name: str  # name of the hook, with its module


class Step(Event):
    """An optimizer is about to take a step.

    If two optimizers step after one backward pass, the second step has no losses and no inputs.
    """

    losses: list[float]  # losses of the backward passes since the previous step
    sample_count: int  # number of samples that DataLoaders returned since then
    inputs: list[int]  # checksums of the batches that models were called with since then

    rng: dict[str, int]  # checksum of the state of each global random number generator
    gradients: dict[str, int]  # checksum of each parameter's gradient, 0 if it has none
    # Checksum of each parameter. With DDP, only the first step of a pass and some others have it:
    weights: dict[str, int] | None
    rates: list[float]  # learning rate of each parameter group
    # "gradient of NAME" if that is not finite, "loss" if a loss is not finite either, or "":
    infinite: str
    zero: bool  # whether all gradients are zero
    # Lines that call a model directly, if it has gradients and its DDP wrapper was not called:
    bypassed: list[str]
    mesh_dimensions: int  # result of values.mesh_dimensions; 0 if the parameters are on no mesh
    has_state: bool  # whether the optimizer has taken a step before, or has loaded a state
    closure: bool  # whether step() was given a closure, which computes the gradients
    synced: bool  # whether the last forward pass of DDP, if any, asked for a reduction
    reductions: int  # number of backward passes that reduced gradients since zero_grad()
    stale: bool  # whether the previous step's gradients were still there when backward() began
    training: bool  # whether all wrapped models with these parameters are in training mode
    in_join: bool  # whether the step is taken inside join()


class Clipped(Event):
    """Gradients are clipped."""

    scaled: bool  # whether they are still multiplied by a GradScaler's factor


class Scheduled(Event):
    """A learning rate scheduler takes a step, after an optimizer has taken one."""

    metric: float | None  # metric that ReduceLROnPlateau gets; None for other schedulers


class StateLoaded(Event):
    """A model or an optimizer has loaded a state."""

    wraps: int  # number of models that had been wrapped before


class Evaluated(Event):
    """A wrapped model is called without gradients, for the first time since a pass began."""

    training: bool  # whether the model is in training mode
    noisy: str  # type of a layer that returns something else in training mode, or ""


class Final(Event):
    """The final weights of a model."""

    weights: dict[str, int]  # checksum of each parameter


# ---------------------------------------------------------------- output and files


class Written(Event):
    """A file is opened to be replaced, not to be appended to or changed, or it is renamed."""

    path: str | None  # its path, or None if it is renamed to one outside of the script's folder
    old_name: str = ""  # its former path, if it is renamed


class Save(Event):
    """torch.save has returned."""

    path: str | None
    keys: list[str]  # up to 3 keys "module.…" that hold parameters of a wrapped model
    wrapper: bool  # whether a model is saved as an object, together with its DDP wrapper
    steps: int  # number of optimizer steps before this save


class Load(Event):
    """The script calls torch.load."""


KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}
