"""Trains by steps on random batches, without a DataLoader; unseeded weights."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    torch.manual_seed(1337 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(10):
        x = torch.randn(8, 4)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
