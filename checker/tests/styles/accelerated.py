"""Hugging Face Accelerate: prepared model, optimizer and loaders; gather_for_metrics."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(101, 4)
    train, test = (TensorDataset(part, part.argmax(dim=1)) for part in x.split((80, 21)))
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaders = DataLoader(train, 10, shuffle=True), DataLoader(test, 8)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, *loaders)
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for inputs, targets in held_out:
            with torch.no_grad():
                guesses = model(inputs).argmax(dim=1)
            guesses, right_ones = accelerator.gather_for_metrics((guesses, targets))
            right += (guesses == right_ones).sum().item()
        accelerator.print(f"epoch {epoch}: {right} of {len(test)}")


if __name__ == "__main__":
    main()
