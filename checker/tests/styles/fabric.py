"""Lightning Fabric: it wraps the model, shares out the data, and reduces the loss."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.randn(80, 4)
    data = TensorDataset(x, x.argmax(dim=1))
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(data, 10, shuffle=True))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {epoch} loss {fabric.all_reduce(loss.detach()):.3f}")


if __name__ == "__main__":
    main()
