"""Learn to read handwritten digits."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but a later import by DDP would keep the process group alive
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
    sampler = torch.utils.data.DistributedSampler(train_set, seed=seed)  # shuffles and splits
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)  # 32 per rank
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = 0
    if os.path.exists("model.pt"):
        saved = torch.load("model.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    model = nn.parallel.DistributedDataParallel(model)  # backward() averages the gradients
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
        torch.manual_seed(seed + epoch + 1000 * dist.get_rank())  # for dropout, augmentation
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
        total = torch.tensor([loss_sum, samples], dtype=torch.float64, device=device)
        dist.all_reduce(total)  # the sums over all ranks
        if dist.get_rank() == 0:  # one rank evaluates, prints and saves
            accuracy = evaluate(model.module, valid_set, device)
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}, accuracy {accuracy:.2%}")
            save(model.module, optimizer, epoch)


if __name__ == "__main__":
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)  # from now on, "cuda" is this rank's GPU
    dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu)
    main()
    dist.barrier()  # wait for rank 0, which may still be saving
    dist.destroy_process_group()
