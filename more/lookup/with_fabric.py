"""Step 5 with Lightning Fabric; see frameworks.md."""

import os
from importlib import import_module

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

step5 = import_module("05_gather_eval")
args = step5.parse_args()
backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
strategy = DDPStrategy(process_group_backend=backend)
fabric = Fabric(devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
fabric.launch()  # joins the process group that torchrun's variables describe
fabric.seed_everything(args.seed)
train_set, test_set = step5.load_datasets()
model = step5.build_model(args.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer = fabric.setup(model, optimizer)
train_loader = fabric.setup_dataloaders(DataLoader(train_set, args.batch_size, shuffle=True))
state = {"MODEL_STATE": model, "OPTIMIZER_STATE": optimizer, "EPOCHS_RUN": 0}
if os.path.exists(args.checkpoint_path):
    fabric.load(args.checkpoint_path, state)

for epoch in range(state["EPOCHS_RUN"], args.total_epochs):
    model.train()
    train_loader._num_iter_calls = epoch  # Fabric's set_epoch, which starts at 0 after a resume
    for source, targets in train_loader:  # moved to the device, in a different order each epoch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(source), targets, label_smoothing=0.1)
        fabric.backward(loss)
        optimizer.step()
    state["EPOCHS_RUN"] = epoch + 1
    fabric.save(args.checkpoint_path, state)  # called by all ranks

step5.evaluate(model.module, test_set, fabric.device, args)
dist.barrier()
del model, state  # DDP goes before its process group
dist.destroy_process_group()
