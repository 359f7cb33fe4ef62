"""Everything at module level, hyperparameters as globals; started by srun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2
BATCH_SIZE = 16
LEARNING_RATE = 1e-2

rank = int(os.environ["SLURM_PROCID"])
os.environ["RANK"] = str(rank)
os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(100, 4)
data = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(data)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, BATCH_SIZE, sampler=sampler):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(epoch, loss.item())
dist.barrier()
del model
dist.destroy_process_group()
