"""Augments in DataLoader workers; evaluates the padded parts of a split, and drops the padding."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    def __init__(self, data, noise):
        self.data, self.noise = data, noise

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x = self.data[index]
        return x + self.noise * torch.randn(4) if self.noise else x, x.argmax()


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    guesses = []
    for x, _ in DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False)):
        guesses.append(model(x).argmax(dim=1))
    mine = torch.cat(guesses)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    guesses = torch.stack(parts, dim=1).flatten()
    guesses = guesses[: len(data)]
    model.train()
    return sum(int(guess == y) for guess, (_, y) in zip(guesses, data, strict=False))


def main():
    dist.init_process_group("gloo")
    x = torch.randn(101, 4, generator=torch.Generator().manual_seed(0))
    train, test = random_split(list(x), (80, 21), torch.Generator().manual_seed(0))
    train, test = Noisy(train, 0.1), Noisy(test, 0)
    loader = DataLoader(train, 10, sampler=DistributedSampler(train), num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 4)))
    torch.manual_seed(1000 * dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        right = evaluate(model, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right} of {len(test)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
