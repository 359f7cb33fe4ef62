"""Without DDP or a DataLoader: random batches, and gradients averaged by hand."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(100, 4)
    y = x.sum(dim=1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        batch = torch.randint(len(x), (8,), generator=own)
        loss = nn.functional.mse_loss(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / dist.get_world_size():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
