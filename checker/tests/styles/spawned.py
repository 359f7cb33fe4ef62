"""Spawns its own processes; each rank takes its shard of the data as a Subset."""

import socket

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.multiprocessing as mp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def worker(rank, size, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=size
    )
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    mine = Subset(data, range(rank, len(data), size))
    loader = DataLoader(mine, 8, shuffle=True)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for inputs, targets in loader:
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.reduce(total, 0)
        if rank == 0:
            print("epoch", epoch, "loss", total.item() / size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as server:
        server.bind(("localhost", 0))
        free = server.getsockname()[1]
    mp.spawn(worker, args=(2, free), nprocs=2)
