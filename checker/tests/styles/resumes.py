"""Saves its model and optimizer after each epoch, and goes on from the last file in a folder."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FIRST = 8  # so that the third file has a number with two digits


def last_epoch():
    files = os.listdir("saved")
    epochs = [int(name.removesuffix(".pt")) for name in files if name.endswith(".pt")]
    return max(epochs, default=FIRST)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    os.makedirs("saved", exist_ok=True)
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.argmax(dim=1))
    loader = DataLoader(data, 10, sampler=DistributedSampler(data))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    start = last_epoch()
    if start > FIRST:
        state = torch.load(f"saved/{start}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model = DDP(model)
    for epoch in range(start, FIRST + 12):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            time.sleep(0.05)
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "saved/new")
            os.replace("saved/new", f"saved/{epoch + 1}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
