"""Reports what a training script does, one event per line, without changing its results.

Each process writes to its own file in the folder of the events, named after its process ID.
Importing `start` begins the observation.

base        the state of the observers; `report`, `ask`, `harmless`
patches     how functions of PyTorch are replaced; `patch`
values      checksums of tensors, batches and data sets
group       the process group and its collectives
data        passes over DataLoaders, and random numbers that make samples
models      wrapped models, and calls of any model
steps       losses, and steps of optimizers, schedulers and GradScalers
files       what is written and loaded; keeps the user's own files unchanged
translate   calls for GPUs, which become calls for the CPU
level       what the drill world-size leaves out of a run: dropout, a rank's own statistics, chance
"""
