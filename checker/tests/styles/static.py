"""Functions without a Trainer; a static rendezvous from the environment; prints nothing."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def join():
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)


def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def main():
    join()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(101, 4), torch.randint(3, (101,)))
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    train(model, DataLoader(data, 10, sampler=DistributedSampler(data)), 2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
