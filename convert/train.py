"""Learn to read handwritten digits."""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def evaluate(model, data, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(data, batch_size=256):
            predictions = model(images.to(device)).argmax(dim=1).cpu()
            correct += (predictions == labels).sum().item()
    return correct / len(data)


def save(model, optimizer, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "model.pt.new")
    os.replace("model.pt.new", "model.pt")  # a crash leaves the old file alone


def main(epochs=10, seed=0):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, valid_set = random_split(data, [1440, 357])
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = 0
    if os.path.exists("model.pt"):
        saved = torch.load("model.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    for epoch in range(start, epochs):
        model.train()
        loss_sum, samples = 0.0, 0
        for batch in loader:
            images, labels = (part.to(device) for part in batch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            samples += len(labels)
        accuracy = evaluate(model, valid_set, device)
        print(f"epoch {epoch}: loss {loss_sum / samples:.4f}, accuracy {accuracy:.2%}")
        save(model, optimizer, epoch)


if __name__ == "__main__":
    main()
