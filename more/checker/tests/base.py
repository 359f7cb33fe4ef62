# ruff: noqa: F401, F841, SIM115
"""A right script. Those of the tests are made of it, by changes to its lines."""

import itertools
import os
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, x):
        self.x, self.y = x, x.argmax(dim=1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def evaluate(model, test):
    model.eval()
    part = DataLoader(test, 8, sampler=DistributedSampler(test, shuffle=False))
    with torch.no_grad():
        mine = torch.cat([model(inputs).argmax(dim=1) for inputs, _ in part])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    guesses = torch.stack(parts, dim=1).flatten()[: len(test)]
    model.train()
    return (guesses == test.dataset.y[test.indices]).sum().item()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(117, 4)
    split = torch.Generator().manual_seed(0)
    data, test = random_split(Points(x), (96, 21), split)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    first = 0
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt", weights_only=True)
        net.load_state_dict(saved["net"])
        first = saved["epochs"]
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if first:
        optimizer.load_state_dict(saved["optimizer"])
    torch.manual_seed(rank)
    for epoch in range(first, 3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f}")
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, "new.pt")
            os.replace("new.pt", "saved.pt")
        right = evaluate(net, test)
        open("log.txt", "a").write(f"rank {rank}: {right}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
