"""Train a character-level GPT to write like the manual that comes with Python."""

import math
import os
import signal
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.nn  # skip at first reading: imported late, it can abort the exit
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
batch_size = 32  # per process
context = 64  # characters that the model sees
width = 64
layers = 2
heads = 4
lr = 5e-3
warm_up = 50  # steps
path = "gpt.pt"

told_to_stop = torch.zeros(1)  # 1 after SIGTERM; a tensor, so that all_reduce can sum it


def check_restarts():
    """Refuse restarts that would connect to dead ranks (pytorch#135712); delete this once fixed."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RuntimeError("--max-restarts needs: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def ddp_setup():
    """Join the process group as the rank that torchrun has put into the environment."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is now this process's GPU
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # gloo for CPU tensors
    dist.init_process_group(backend, timeout=timedelta(minutes=5))  # fail if a node is lost


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


signal.signal(signal.SIGTERM, lambda *_: told_to_stop.fill_(1))
check_restarts()
ddp_setup()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

text = "\n".join(topics[name] for name in sorted(topics))
characters = sorted(set(text))
number = {character: i for i, character in enumerate(characters)}
numbers = torch.tensor([number[character] for character in text])
split = len(numbers) * 9 // 10


class Windows(Dataset):
    """Pieces of the text, each paired with the same piece shifted by one character."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return (len(self.numbers) - 1) // context

    def __getitem__(self, index):
        piece = self.numbers[index * context : (index + 1) * context + 1]
        return piece[:-1], piece[1:]


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that starts after the epoch's first `samples_run` samples."""

    samples_run = 0

    def __iter__(self):
        return islice(super().__iter__(), self.samples_run // self.num_replicas, None)


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


def stop_agreed():
    """Return whether any rank was told to stop. All ask at the same step, so all agree."""
    votes = told_to_stop.clone()
    dist.all_reduce(votes)
    return votes.item() > 0


def save(epochs_run):
    if dist.get_rank() != 0:  # all ranks hold the same weights: one file is enough
        return
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs_run": epochs_run,
        "samples_run": samples_run,
    }
    torch.save(checkpoint, f"{path}.new")  # a crash leaves the old file alone
    with open(f"{path}.new", "rb") as file:
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    if interrupted:
        Path(f"{path}.interrupted").touch()  # tells the batch script to requeue the job


@torch.inference_mode()
def evaluate(model):
    """Return the loss on the held-out windows."""
    total = 0.0
    for x, y in test_data:
        total += batch_loss(model, x, y).item() * len(x)
    total = torch.tensor(total, dtype=torch.float64, device=device)
    dist.all_reduce(total)  # the sum over all ranks
    return total.item() / len(test_set)


@torch.inference_mode()
def write(model, length):
    """Return text sampled from the model."""
    written = torch.tensor([[number["\n"]]], device=device)
    for _ in range(length):
        logits = model(written[:, -context:])[:, -1]
        drawn = torch.multinomial(F.softmax(logits, dim=-1), 1)
        written = torch.cat([written, drawn], dim=1)
    return "".join(characters[i] for i in written[0])


train_set, test_set = Windows(numbers[:split]), Windows(numbers[split:])
train_data = DataLoader(train_set, batch_size, sampler=ResumableSampler(train_set))
shard = range(dist.get_rank(), len(test_set), dist.get_world_size())  # no sample twice
test_data = DataLoader(test_set, batch_size, sampler=shard)
steps = epochs * len(train_data)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
epochs_run = 0
samples_run = 0  # in this epoch, by all ranks together
interrupted = False
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    epochs_run = checkpoint["epochs_run"]
    samples_run = checkpoint.get("samples_run", 0)
    Path(f"{path}.interrupted").unlink(missing_ok=True)
    log(f"resuming from {path} after epoch {epochs_run}")
# The steps taken so far, counted at the current world size, which may have changed.
steps_run = epochs_run * len(train_data) + samples_run // (batch_size * dist.get_world_size())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule, last_epoch=steps_run - 1)
ddp_model = DDP(model)  # backward() averages the gradients over all ranks

for epoch in range(epochs_run, epochs):
    model.train()
    train_data.sampler.set_epoch(epoch)  # or every epoch has the same order
    train_data.sampler.samples_run = samples_run
    start = time.perf_counter()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss and samples
    for step, (x, y) in enumerate(train_data):
        if step % 10 == 0 and stop_agreed():  # asking in each step would cost time
            interrupted = True
            break
        optimizer.zero_grad()
        loss = batch_loss(ddp_model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total[0] += loss.detach() * len(x)
        total[1] += len(x)
        samples_run += len(x) * dist.get_world_size()
    if interrupted:
        save(epoch)
        log(f"interrupted after {samples_run:,} samples of the epoch")
        break
    dist.all_reduce(total)  # the sum over all ranks
    loss, samples = total.tolist()  # waits for the GPU, so read the clock after it
    speed = samples * context / (time.perf_counter() - start)
    log(f"epoch {epoch + 1}  loss {loss / samples:.4f}  {speed:,.0f} characters/s")
    samples_run = 0
    save(epoch + 1)

model.eval()
if not interrupted:
    log(f"held-out loss {evaluate(model):.4f}")
    if dist.get_rank() == 0:
        print(write(model, 300))
dist.barrier()  # wait until every rank has finished with the group
del ddp_model  # skip at first reading: DDP freed after its group can hang
dist.destroy_process_group()
if interrupted:
    raise SystemExit(os.EX_TEMPFAIL)
