"""What the observer reports: a dataclass for each kind of event. Does not import PyTorch."""

import json
from dataclasses import dataclass, make_dataclass


@dataclass(kw_only=True)
class Event:
    time: float = 0  # in seconds
    where: str = ""  # the line of the script, as "file:line"

    def __str__(self):
        return json.dumps({"kind": type(self).__name__, **vars(self)}, default=str)


def read(line):
    """Return the event that is written on a line."""
    values = json.loads(line)
    return globals()[values.pop("kind")](**values)


def kind(name, fields=""):
    """Return the class of a kind of event."""
    made = make_dataclass(name, fields.split(), bases=(Event,), kw_only=True)
    made.__module__ = __name__  # as for a class statement: it can be pickled
    return made


Start = kind("Start", "rank")  # as its launcher says
# It joined a process group; nn: torch.distributed.nn was imported before; own: by the script itself
Join = kind("Join", "rank port nn own")
Leave = kind("Leave", "models")  # it destroyed the group; how many wrapped models are still alive
Exit = kind("Exit", "open_group threads nn")  # threads: of gloo
OtherMachine = kind("OtherMachine", "host")  # it was told to meet the others there
Handler = kind("Handler")  # it set a handler for SIGTERM
Translated = kind("Translated", "call")
# It named a GPU. use: "set" or "use"; count: of all GPUs; chosen: it chose what it can see
Gpu = kind("Gpu", "use index count chosen")
# It called a collective on all ranks. adds: numbers are added up; inside: of a forward or backward
# pass; elements: of its largest tensor; gradient: its input requires one, its result has none
Collective = kind("Collective", "name adds inside elements gradient")
Received = kind("Received")  # it waited for what another rank sent
# A backward pass ends at what a collective returned; own: also at what this rank gave
GradientLost = kind("GradientLost", "own")

# A pass over a DataLoader. length: of the data set; total: batches to come; part: checksum of the
# indices that a Subset keeps, or 0; distributed: has a DistributedSampler; tensors: checksum of a
# TensorDataset; data: checksum, the same for equal data sets; persistent: its workers stay
PassBegun = kind(
    "PassBegun",
    "number length total iterable part distributed shuffle drop_last tensors data persistent",
)
# number: of the pass; base: indices in the data set below all Subsets; samples: checksums; labels:
# checksums of the smallest part of each, if it has several
Batch = kind("Batch", "number indices base samples labels")
PassEnded = kind("PassEnded", "number")
Looked = kind("Looked")  # a model was called without gradients, for the first time since a batch
EpochSet = kind("EpochSet", "value")  # it called set_epoch
# A random number generator made its first sample; checksums of its state. source: whose it is, or
# "generator" for those that the data set keeps
Drawn = kind("Drawn", "source before after worker")
# After a gather, a tensor was cut. order: it held what the ranks gave in "blocks" of one rank each,
# or in "another" order; empty if in turns, as DistributedSampler deals, or unknown
Cut = kind("Cut", "dropped order")
Counted = kind("Counted", "length reduced")  # a gathered tensor was compared, or reduced by sum()
Totalled = kind("Totalled", "values")  # whole numbers that were added up over all ranks

Wrap = kind("Wrap", "names buffers")  # names: of parameters; buffers: each rank updates some
# An optimizer is about to take a step; what is counted is counted since the step before.
# gradients, weights: {name: checksum}; weights may be None; losses: whose backward pass came;
# samples: that were loaded; inputs: checksums of what entered the model; infinite: "loss",
# "gradient of …" or nothing; zero: all gradients are; unused: parameters without a gradient;
# foreign: parameters in no wrapped model; bypassed: models that got gradients without a call of
# their wrappers; sharded: dimensions of the mesh; state: the optimizer has one; closure: it
# computes the gradients; synced: the last forward pass asked for a reduction; by_hand: checksums of
# what the script reduced itself, and whether that was all gradients; buffers: {name: checksum};
# random: checksum of the generator's state; dropout: the model drew numbers; joined: inside join()
Step = kind(
    "Step",
    "gradients weights rates losses samples inputs infinite zero unused foreign bypassed sharded "
    "state closure synced reductions by_hand training buffers random dropout joined",
)
Bypass = kind("Bypass", "model")  # a wrapped model was called in training without its wrapper
Clipped = kind("Clipped", "scaled")  # while a GradScaler's factor was in the gradients
Scheduled = kind("Scheduled")  # a scheduler took a step
StateLoaded = kind("StateLoaded", "wraps")  # how many models were wrapped before
# A model was called without gradients, for the first time in a pass. values: checksums of its
# parameters and buffers; noisy: the layer that changes what it returns, being in training mode
Evaluated = kind("Evaluated", "model steps values noisy wrapped number")
Final = kind("Final", "weights finite")

Print = kind("Print", "text")
Opened = kind("Opened", "path append")  # for writing
Renamed = kind("Renamed", "path source")
# torch.save has returned; keys: that begin with module.; steps: of the optimizers before
Save = kind("Save", "path keys steps")
Load = kind("Load", "weights_only")
