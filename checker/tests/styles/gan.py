"""Two models with an optimizer each; two losses and backward passes before a step."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(0)) + 1)
    loader = DataLoader(data, 10, sampler=DistributedSampler(data))
    maker, judge = DDP(nn.Linear(3, 4)), DDP(nn.Linear(4, 1), broadcast_buffers=False)
    torch.manual_seed(1000 * dist.get_rank())
    makes = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = maker(torch.randn(len(real), 3))
            judges.zero_grad()
            bce(judge(real), torch.ones(len(real), 1)).backward()
            bce(judge(fake.detach()), torch.zeros(len(real), 1)).backward()
            judges.step()
            makes.zero_grad()
            loss = bce(judge(fake), torch.ones(len(real), 1))
            loss.backward()
            makes.step()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item() / dist.get_world_size():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
