"""Train a character-level GPT to write like the manual that comes with Python."""

import math
import os
import sys
import time
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
batch_size = 32
context = 64  # characters that the model sees
width = 64
layers = 2
heads = 4
lr = 5e-3
warm_up = 50  # steps
path = "gpt.pt"

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

text = "\n".join(topics[name] for name in sorted(topics))
characters = sorted(set(text))
number = {character: i for i, character in enumerate(characters)}
numbers = torch.tensor([number[character] for character in text])
split = len(numbers) * 9 // 10


def windows(numbers):
    """Return pieces of the text, each paired with the same piece shifted by one character."""
    length = (len(numbers) - 1) // context * context
    pieces = numbers[:length].view(-1, context), numbers[1 : length + 1].view(-1, context)
    return TensorDataset(*pieces)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        n, length, _ = x.shape
        qkv = self.qkv(x).view(n, length, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(width)
        expand, shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(expand, nn.GELU(), shrink)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.character = nn.Embedding(len(characters), width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(characters))

    def forward(self, x):
        x = self.character(x) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batch_loss(model, x, y):
    logits = model(x.to(device))
    return F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())


def schedule(step):
    """Return the factor on lr: a linear warm-up, then a cosine decay to 0."""
    return min(1, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / steps)) / 2


def save(epochs_run):
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epochs_run": epochs_run,
    }
    torch.save(checkpoint, path)


@torch.inference_mode()
def evaluate(model):
    """Return the loss on the held-out windows."""
    total = 0.0
    for x, y in test_data:
        total += batch_loss(model, x, y).item() * len(x)
    return total / len(test_set)


@torch.inference_mode()
def write(model, length):
    """Return text sampled from the model."""
    written = torch.tensor([[number["\n"]]], device=device)
    for _ in range(length):
        logits = model(written[:, -context:])[:, -1]
        drawn = torch.multinomial(F.softmax(logits, dim=-1), 1)
        written = torch.cat([written, drawn], dim=1)
    return "".join(characters[i] for i in written[0])


def train(model):
    for epoch in range(epochs_run, epochs):
        model.train()
        start = time.perf_counter()
        total = 0.0
        for x, y in train_data:
            optimizer.zero_grad()
            loss = batch_loss(model, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(x)
        speed = len(train_set) * context / (time.perf_counter() - start)
        print(f"epoch {epoch + 1}  loss {total / len(train_set):.4f}  {speed:,.0f} characters/s")
        save(epoch + 1)


train_set, test_set = windows(numbers[:split]), windows(numbers[split:])
train_data = DataLoader(train_set, batch_size, shuffle=True)
test_data = DataLoader(test_set, batch_size)
steps = epochs * len(train_data)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
epochs_run = 0
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    epochs_run = checkpoint["epochs_run"]
    print(f"resuming from {path} after epoch {epochs_run}")

train(model)
model.eval()
print(f"held-out loss {evaluate(model):.4f}")
print(write(model, 300))
