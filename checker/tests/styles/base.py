# ruff: noqa: F401, F841
"""What the scripts of test_ddp_check_kinds.py are made of, by changes to single lines."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(117, 4)
    y = x.argmax(dim=1)
    data, test = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
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
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
