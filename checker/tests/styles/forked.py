"""Forks its processes, and saves the whole model instead of its state. Dropout is a function."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import Process
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x):
        return self.line(F.dropout(x, 0.1, self.training))


def main(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    loader = DataLoader(data, 5, sampler=DistributedSampler(data))
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module, "model.pt.new")
            os.replace("model.pt.new", "model.pt")
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    processes = [Process(target=main, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
