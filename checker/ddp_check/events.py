"""What the observer reports: a dataclass for each kind of event. Does not import PyTorch.

A process writes an event as a line of JSON, and the checker reads it again. Checksums are whole
numbers, equal if the values were equal bit for bit; "0 or None" says that there was nothing to sum.
"""

import json
from dataclasses import dataclass


@dataclass(kw_only=True)
class Event:
    """Something that a process of the script did."""

    time: float = 0.0  # in seconds, of a clock that all processes share
    where: str = ""  # the line of the script, as "file:line"; "" if none of its lines is running

    def __str__(self):
        return json.dumps({"kind": type(self).__name__, **vars(self)}, default=str)


def read(line):
    """Return the event that is written on a line."""
    values = json.loads(line)
    return KINDS[values.pop("kind")](**values)


# ---------------------------------------------------------------- processes and their group


@dataclass(kw_only=True)
class Start(Event):
    """The process imported PyTorch."""

    rank: int | str | None = None  # as its launcher says


@dataclass(kw_only=True)
class Unpatched(Event):
    """This PyTorch has no such function, so it is not observed."""

    name: str
    lacks: str  # what the report lacks


@dataclass(kw_only=True)
class Trouble(Event):
    """The observer has failed to look at something; the script has not noticed it."""

    error: str
    place: str  # in the observer, as "file:line"


@dataclass(kw_only=True)
class Join(Event):
    """It joined a process group."""

    rank: int
    port: int | str | None  # at which the ranks met
    nn_imported: bool  # torch.distributed.nn had been imported before
    by_script: bool  # not by a library


@dataclass(kw_only=True)
class Leave(Event):
    """It is about to destroy the process group."""

    live_wrappers: int  # DDP models that still exist


@dataclass(kw_only=True)
class Exit(Event):
    """It ends, and Python's atexit functions run."""

    group_open: bool  # the process group was not destroyed
    gloo_threads: int
    nn_imported: bool  # torch.distributed.nn has been imported, by now


@dataclass(kw_only=True)
class OtherMachine(Event):
    """It was told to meet the other ranks on another machine; they meet here instead."""

    host: str


@dataclass(kw_only=True)
class SigtermHandler(Event):
    """It set a handler for SIGTERM."""


@dataclass(kw_only=True)
class Translated(Event):
    """It made a call for a GPU, which was translated for the CPU."""

    call: str  # as the script could have written it


@dataclass(kw_only=True)
class Gpu(Event):
    """It named a GPU, for the first time in this way."""

    use: str  # "set": by set_device; "use": by anything else
    index: int
    count: int  # of the GPUs that a node has
    visible_chosen: bool  # the script has set CUDA_VISIBLE_DEVICES


# ---------------------------------------------------------------- communication


@dataclass(kw_only=True)
class Collective(Event):
    """The script, or a library on its behalf, calls a collective on all ranks."""

    name: str
    sums: bool  # it adds numbers up, or averages them
    in_model: bool  # during a forward pass of DDP, or a backward pass
    elements: int  # of its largest tensor
    cuts_gradient: bool  # its input requires a gradient, and its result has none


@dataclass(kw_only=True)
class Received(Event):
    """It is about to wait for what another rank sends."""


@dataclass(kw_only=True)
class GradientLost(Event):
    """A backward pass has ended at a tensor that an all_gather returned."""

    own_part: bool  # also at what this rank itself gave


@dataclass(kw_only=True)
class ReducedInPlace(Event):
    """A backward pass goes through a tensor that a collective has summed up in place.

    The collective has no gradient: what comes from the other ranks counts as a constant.
    """

    name: str  # of the collective
    elements: int


@dataclass(kw_only=True)
class Cut(Event):
    """After a gather, the end of a tensor was cut off."""

    dropped: int  # elements
    # What it held: "blocks" of one rank each, or "another" order; "" if what the ranks gave lay in
    # turns, as DistributedSampler deals, or if that is not known.
    order: str


@dataclass(kw_only=True)
class Counted(Event):
    """After a gather, a tensor was compared, converted, or reduced to a number."""

    length: int
    reduced: bool  # by sum() or mean()


@dataclass(kw_only=True)
class Totalled(Event):
    """Numbers were added up over all ranks."""

    values: list[int]  # the whole ones, and their sum
    own: float | None  # of this rank, if it is a single number
    total: float | None  # over the ranks, likewise


# ---------------------------------------------------------------- data


@dataclass(kw_only=True)
class PassBegun(Event):
    """A pass over a DataLoader begins."""

    number: int  # counts the passes of this process
    length: int | None  # of the data set, if it has one
    total: int | None  # batches to come, if that is known
    iterable: bool  # the data set is an IterableDataset: its samples have no index
    part: int  # checksum of the indices that a Subset keeps, or 0
    distributed: bool  # the sampler is a DistributedSampler
    shuffle: bool
    drop_last: bool
    tensors: int  # checksum of a TensorDataset's tensors, or 0
    data: int  # checksum, the same for equal data sets
    persistent: bool  # its workers stay for the next pass


@dataclass(kw_only=True)
class Batch(Event):
    """A DataLoader has returned a batch."""

    number: int  # of the pass
    indices: list[int] | None  # as the sampler gave them
    base: list[int] | None  # the same samples in the data set below all Subsets
    samples: list[int] | None  # checksum of each sample
    labels: list[int] | None  # checksum of the smallest part of each, if it has several
    width: int | None  # elements of a sample; where padding changes it, checksums differ


@dataclass(kw_only=True)
class PassEnded(Event):
    """A DataLoader has no more batches."""

    number: int  # of the pass


@dataclass(kw_only=True)
class Looked(Event):
    """A model is called without gradients, for the first time since a batch."""


@dataclass(kw_only=True)
class EpochSet(Event):
    """DistributedSampler.set_epoch is called."""

    value: int


@dataclass(kw_only=True)
class Drawn(Event):
    """Random numbers were drawn to make samples, by this generator for the first time."""

    source: str  # "torch", "random", "numpy", or "generator" for those that the data set keeps
    before: int  # checksums of the generator's state
    after: int
    worker: int | None  # of the DataLoader, or None for the training process


# ---------------------------------------------------------------- models and optimizers


@dataclass(kw_only=True)
class Wrap(Event):
    """A model was wrapped in DistributedDataParallel."""

    names: list[str]  # of its parameters


@dataclass(kw_only=True)
class CommHook(Event):
    """A wrapped model gets a hook that reduces its gradients instead of DDP."""

    name: str  # of the hook, with its module


@dataclass(kw_only=True)
class Step(Event):
    """An optimizer is about to take a step. What is counted is counted since the step before."""

    gradients: dict[str, int]  # checksum of each parameter's gradient, 0 without one
    weights: dict[str, int] | None  # checksum of each parameter, in the first step of a pass
    rates: list[float]  # learning rate of each group of parameters
    losses: list[float]  # whose backward pass came
    divisors: list[float]  # of these losses or their terms; a factor counts as its inverse
    loss_reduced: bool  # a loss comes out of torch.distributed.nn.all_reduce
    backwards: int  # backward passes
    # A projection of all gradients: of those that this rank computed, summed up, and of those that
    # the optimizer takes. None after the first steps, with a GradScaler or sharded parameters.
    own_gradient: float | None
    taken_gradient: float | None
    samples: int  # that a DataLoader returned
    inputs: list[int]  # checksums of the batches that entered the models
    infinite: str  # what is not finite: "loss", "gradient of NAME", or ""
    zero: bool  # all gradients are zero
    unused: int  # parameters that require a gradient and have none
    foreign: int  # parameters that are in no wrapped model
    bypassed: list[int]  # wrapped models that have gradients, though no wrapper was called
    sharded: int  # dimensions of the mesh that the parameters are sharded over
    has_state: bool  # the optimizer has taken a step before, or its state was loaded
    closure: bool  # step() was given one, which computes the gradients
    synced: bool  # the last forward pass of DDP asked for a reduction
    reductions: int  # backward passes that reduced gradients, of the model with the most
    reduced: list[int]  # checksums of what the script itself added up over the ranks
    reduced_all: bool  # that is as much as all gradients
    training: bool  # the wrapped models are in training mode
    buffers: dict[str, int]  # checksum of each buffer, without BatchNorm's statistics
    buffers_changed: list[str]  # since their model was wrapped, statistics included
    # Who has drawn from PyTorch's generator, "model" or "script", and a checksum of its state
    # before. A DataLoader's seed and a sampler's order do not count, nor what makes samples.
    random: dict[str, int]
    joined: bool  # it is taken inside join()


@dataclass(kw_only=True)
class Bypass(Event):
    """A wrapped model is called in training without its wrapper."""

    model: int


@dataclass(kw_only=True)
class Clipped(Event):
    """Gradients are clipped."""

    scaled: bool  # a GradScaler's factor is in them


@dataclass(kw_only=True)
class Scheduled(Event):
    """A learning rate scheduler takes a step."""

    metric: float | None  # that ReduceLROnPlateau gets


@dataclass(kw_only=True)
class SkippedStep(Event):
    """A GradScaler has skipped an optimizer's step, as a gradient was not finite."""

    scale: float  # the factor that was too large


@dataclass(kw_only=True)
class StateLoaded(Event):
    """A model or an optimizer loads a state."""

    wraps: int  # how many models had been wrapped before


@dataclass(kw_only=True)
class Evaluated(Event):
    """A model is called without gradients, for the first time in a pass."""

    model: str  # its class
    steps: int  # of the optimizers before
    values: dict[str, int]  # checksum of each parameter and buffer
    noisy: str  # the layer that changes what the model returns, being in training mode, or ""
    wrapped: bool  # in DistributedDataParallel
    number: int  # of the pass


@dataclass(kw_only=True)
class Final(Event):
    """The weights of a model at the end."""

    weights: dict[str, int]  # checksum of each parameter
    finite: bool


# ---------------------------------------------------------------- output and files


@dataclass(kw_only=True)
class Print(Event):
    """A line is printed, or logged."""

    text: str


@dataclass(kw_only=True)
class Opened(Event):
    """A file was opened for writing."""

    path: str
    append: bool


@dataclass(kw_only=True)
class Renamed(Event):
    """A file is renamed."""

    path: str | None  # its new name, or None outside of the script's folder
    source: str


@dataclass(kw_only=True)
class Save(Event):
    """torch.save has returned."""

    path: str | None
    keys: list[str]  # the first ones that begin with "module."
    steps: int  # of the optimizers before


@dataclass(kw_only=True)
class ShardedSave(Event):
    """torch.distributed.checkpoint has saved a checkpoint, all of it."""

    path: str | None
    steps: int  # of the optimizers before it began
    asynchronous: bool


@dataclass(kw_only=True)
class ShardedLoad(Event):
    """torch.distributed.checkpoint is about to load a checkpoint."""

    path: str | None


@dataclass(kw_only=True)
class Load(Event):
    """torch.load is called by the script."""

    weights_only: bool


KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}
