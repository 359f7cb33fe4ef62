"""Accumulates four batches per step with no_sync; evaluates through DDP, with BatchNorm."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = torch.zeros(1)
    for x, y in loader:
        right += (model(x).argmax(dim=1) == y).sum()
    model.train()
    dist.all_reduce(right)
    return right.item()


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP copies rank 0's model; the data has a seed of its own
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(230, 4, generator=generator)
    data, held_out = (TensorDataset(a, a.argmax(dim=1)) for a in x.split((160, 70)))
    loader = DataLoader(data, 10, sampler=DistributedSampler(data))
    own = list(range(rank, len(held_out), dist.get_world_size()))
    test = DataLoader(held_out, 10, sampler=own)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, 1):
            last = number % 4 == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (nn.functional.cross_entropy(model(inputs), targets) / 4).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        right = evaluate(model, test)
        if rank == 0:
            print(f"epoch {epoch + 1}: {right:.0f} of {len(held_out)}")
            torch.save(model.module.state_dict(), "model.pt.tmp")
            os.rename("model.pt.tmp", "model.pt")
    del model
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
