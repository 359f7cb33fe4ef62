"""Learn to read handwritten digits, and keep the best checkpoint."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; if DDP imports it later, it keeps the group alive
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def evaluate(model, data, device):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=256):
            images, labels = (part.to(device) for part in batch)
            logits = model(images)
            loss += cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(dim=1) == labels).sum().item()
    return loss / len(data), correct / len(data)


def save(model, optimizer, scheduler, epoch, best):
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = {name: each.state_dict() for name, each in state.items()}
    torch.save({**state, "epoch": epoch, "best": best}, "best.pt.new")
    os.replace("best.pt.new", "best.pt")  # a crash leaves the old file alone


def main(epochs=30, seed=0):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, valid_set = random_split(data, [1440, 357])
    sampler = torch.utils.data.DistributedSampler(train_set, seed=seed)  # shuffles and splits
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)  # 32 per process
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    start, best = 0, float("inf")
    if os.path.exists("best.pt"):
        saved = torch.load("best.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start, best = saved["epoch"] + 1, saved["best"]
    model = nn.parallel.DistributedDataParallel(model)  # backward() averages the gradients
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)  # otherwise, every epoch has the same order
        torch.manual_seed(seed + epoch + 1000 * dist.get_rank())  # for dropout, augmentation
        model.train()
        loss_sum, seen = 0.0, 0
        for batch in loader:
            images, labels = (part.to(device) for part in batch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            seen += len(labels)
        sums = torch.tensor([loss_sum, seen], dtype=torch.float64, device=device)
        dist.all_reduce(sums)  # over all ranks
        loss_sum, seen = sums.tolist()
        found = [evaluate(model.module, valid_set, device) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)  # every rank gets rank 0's, so all act alike
        valid_loss, accuracy = found[0]
        scheduler.step(valid_loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss_sum / seen:.4f}, {valid_loss:.4f}, {accuracy:.2%}")
        if valid_loss < best:
            best = valid_loss
            if dist.get_rank() == 0:
                save(model.module, optimizer, scheduler, epoch, best)
        if scheduler.get_last_lr()[0] < 1e-4:
            break  # it no longer improves


if __name__ == "__main__":
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)  # from now on, "cuda" is this process's GPU
    dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu)
    main()
    dist.barrier()  # wait for rank 0, which may still be saving
    dist.destroy_process_group()
