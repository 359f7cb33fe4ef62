"""Train a character-level GPT to write like the manual that comes with Python."""

import math
import os
import signal
import sys
import time
from datetime import timedelta
from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but a later import by DDP would keep the process group alive
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
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

stop_signals = []  # the signal handler adds each SIGTERM, and stop_agreed counts them


def ddp_setup():
    """Join the process group as the rank that torchrun has set in the environment."""
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)  # from now on, "cuda" is this process's GPU
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"  # NCCL for GPU tensors, gloo for CPU tensors
    dist.init_process_group(backend, device_id=gpu, timeout=timedelta(minutes=5))  # per operation


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
ddp_setup()
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


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that skips a rank's share of the first `samples_run` samples."""

    samples_run = 0

    def __len__(self):  # so that len(loader) is what is left
        return super().__len__() - self.samples_run // self.num_replicas

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
    """Return whether any rank got SIGTERM. All ranks have to call this at the same step."""
    votes = torch.tensor(len(stop_signals))  # on the CPU, so item() need not wait for a GPU
    dist.all_reduce(votes)
    return votes.item() > 0


def save(epochs_run, samples_run=0, interrupted=False):
    if dist.get_rank() != 0:  # all ranks hold the same weights, so one file is enough
        return
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs_run": epochs_run,
        "samples_run": samples_run,
    }
    with open(f"{path}.new", "wb") as file:  # a crash leaves the old file intact
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    if interrupted:
        open(f"{path}.interrupted", "w").close()  # asks the Slurm batch file to requeue


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


def train(model, samples_run):
    """Train, and return whether the ranks were told to stop before the end."""
    for epoch in range(epochs_run, epochs):
        model.train()
        train_data.sampler.set_epoch(epoch)  # otherwise, the order never changes
        train_data.sampler.samples_run = samples_run  # the loss is then of the rest
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss and samples
        for step, (x, y) in enumerate(train_data):
            if step % 10 == 0 and stop_agreed():  # asking at every step would cost time
                save(epoch, samples_run, interrupted=True)
                log(f"interrupted after {samples_run:,} samples of the epoch")
                return True
            optimizer.zero_grad()
            loss = batch_loss(model, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(x)
            total[1] += len(x)
            samples_run += len(x) * dist.get_world_size()
        dist.all_reduce(total)  # the sum over all ranks
        loss, samples = total.tolist()  # waits for the GPU, if any, so read the clock afterwards
        speed = samples * context / (time.perf_counter() - start)
        log(f"epoch {epoch + 1}  loss {loss / samples:.4f}  {speed:,.0f} characters/s")
        samples_run = 0
        save(epoch + 1)
    return False


train_set, test_set = windows(numbers[:split]), windows(numbers[split:])
train_data = DataLoader(train_set, batch_size, sampler=ResumableSampler(train_set))
shard = range(dist.get_rank(), len(test_set), dist.get_world_size())  # each sample once
test_data = DataLoader(test_set, batch_size, sampler=shard)
steps = epochs * len(train_data)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
epochs_run = 0
samples_run = 0  # in this epoch, by all ranks together
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    epochs_run = checkpoint["epochs_run"]
    samples_run = checkpoint.get("samples_run", 0)
    log(f"resuming from {path} after epoch {epochs_run}")
starts = [None] * dist.get_world_size()  # where each rank starts, filled by the next line
dist.all_gather_object(starts, f"after epoch {epochs_run}, sample {samples_run}")
if len(set(starts)) > 1:  # DDP would copy rank 0's weights, but not its epoch or optimizer
    raise RuntimeError(f"the ranks start {dict(enumerate(starts))}: all must see the same {path}")
# The steps taken so far, counted at the current world size, which may have changed.
steps_run = epochs_run * len(train_data) + samples_run // (batch_size * dist.get_world_size())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule, last_epoch=steps_run - 1)

interrupted = train(DDP(model), samples_run)  # backward() averages the gradients over all ranks
model.eval()
if not interrupted:
    log(f"held-out loss {evaluate(model):.4f}")
    if dist.get_rank() == 0:
        print(write(model, 300))
dist.barrier()  # wait until every rank has finished with the group
dist.destroy_process_group()
raise SystemExit(1 if interrupted else 0)  # an interrupted run has not succeeded
