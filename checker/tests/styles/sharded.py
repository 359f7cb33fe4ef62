"""FSDP2: each rank holds a shard of each parameter."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(80, 4)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    loader = DataLoader(data, 10, sampler=DistributedSampler(data))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item() / dist.get_world_size():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
