"""The shortest loop with DDP, for step 5's data and model: it saves and evaluates nothing."""

import os
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

step5 = import_module("05_gather_eval")
args = step5.parse_args()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
torch.manual_seed(args.seed)
train_set, _ = step5.load_datasets()
model = nn.parallel.DistributedDataParallel(step5.build_model(args.width).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, args.batch_size, sampler=sampler)
for epoch in range(args.total_epochs):
    sampler.set_epoch(epoch)
    for source, targets in loader:
        logits = model(source.to(device))
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, targets.to(device), label_smoothing=0.1).backward()
        optimizer.step()
dist.barrier()
del model
dist.destroy_process_group()
