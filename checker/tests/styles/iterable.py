"""An iterable data set split by rank, DataLoader workers, and one seed for everything."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(self.rank * workers + number, 96, self.size * workers):
            x = torch.randn(4, generator=torch.Generator().manual_seed(index))
            yield x, x.sum().sign()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(Stream(rank, size), 8, num_workers=1)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        losses = []
        for x, y in loader:
            loss = nn.functional.soft_margin_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        gathered = [None] * size
        dist.all_gather_object(gathered, sum(losses) / len(losses))
        if rank == 0:
            print(f"epoch {epoch}: {sum(gathered) / size:.3f}")
    dist.barrier()
    dist.destroy_process_group()


main()
