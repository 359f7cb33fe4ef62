"""Reports what a training script does, one event per line, without changing its results.

Each process writes to its own file, named after its process ID, in the folder of the events; a
DataLoader worker writes to that of its rank.
Importing `start` begins the observation.

base        the state that the observers share; `report`, `ask`, `harmless`
patches     how functions of PyTorch are replaced; `patch`
values      checksums of tensors, batches and data sets
group       the process group and its collectives
data        passes over DataLoaders, and random numbers that make samples
models      models that are wrapped in DDP, and calls of any model
steps       losses, and steps of optimizers, schedulers and GradScalers
files       what is written and loaded; keeps the user's own files unchanged
translate   turns calls for GPUs into calls for the CPU
level       for the drill world-size, removes dropout, per-rank statistics and chance from a run
"""
