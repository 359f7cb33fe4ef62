"""Reports what a training script does, one event per line, without changing its results.

Each process writes to its own file in the folder of the events, named after its process ID.
Importing `start` begins the observation.

base        the state of the observers; `report`, `ask`, `harmless`
patches     how functions of PyTorch are replaced; `patch`
values      checksums of tensors, batches and data sets
randomness  who draws random numbers
group       the process group, collectives, and what they gather
data        passes over DataLoaders
losses      losses and what they are divided by
models      wrapped models, and calls of any model
steps       steps of optimizers, schedulers and GradScalers
files       what is printed, written and loaded
translate   calls for GPUs, which become calls for the CPU
"""
