"""Asks torch.accelerator; evaluates what drop_last leaves out on every rank; no seeds."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def evaluate(model, data, device):
    model.eval()
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    right = torch.zeros(1, device=device)
    for x, y in DataLoader(data, 8, sampler=sampler):
        right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
    dist.all_reduce(right)
    rest = range(len(sampler) * dist.get_world_size(), len(data))
    for x, y in DataLoader(Subset(data, rest), 8):
        right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
    model.train()
    return right.item()


def main():
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    x = torch.randn(181, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.argmax(dim=1))
    train, test = random_split(data, (160, 21), torch.Generator().manual_seed(0))
    loader = DataLoader(train, 10, sampler=DistributedSampler(train))
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        right = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch}: {right:.0f} of {len(test)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
