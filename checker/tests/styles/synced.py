"""For GPUs, with SyncBatchNorm; the ranks take their numbers from Slurm and meet elsewhere."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["MASTER_ADDR"] = "10.255.255.1"
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)]
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(*layers)).cuda()
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x.cuda()), y.cuda())
            total = loss.detach().clone()
            dist.all_reduce(total)
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"loss {total.item() / 2:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
