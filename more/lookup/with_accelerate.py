"""Step 5 with Hugging Face's Accelerate; see frameworks.md."""

import glob
from importlib import import_module

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

step5 = import_module("05_gather_eval")  # its data, model, loader and arguments
args = step5.parse_args()
accelerator = Accelerator(cpu=not torch.cuda.is_available())  # joins the process group
torch.manual_seed(args.seed)
train_set, test_set = step5.load_datasets()
model = step5.build_model(args.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer = accelerator.prepare(model, optimizer)  # moves them, and wraps the model in DDP
train_loader = step5.prepare_dataloader(train_set, args)
test_loader = accelerator.prepare(DataLoader(test_set, args.batch_size))
done = len(glob.glob(f"{args.checkpoint_path}.state*"))  # in epochs
if done:
    accelerator.load_state(f"{args.checkpoint_path}.state{done}")

for epoch in range(done, args.total_epochs):
    train_loader.sampler.set_epoch(epoch)
    model.train()
    for source, targets in train_loader:
        optimizer.zero_grad()
        output = model(source.to(accelerator.device))
        wanted = targets.to(accelerator.device)
        loss = nn.functional.cross_entropy(output, wanted, label_smoothing=0.1)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.save_state(f"{args.checkpoint_path}.state{epoch + 1}")  # called by all ranks

model.eval()
correct = 0
for source, targets in test_loader:
    with torch.inference_mode():
        predictions = model(source).argmax(dim=1)
    gathered = accelerator.gather_for_metrics((predictions, targets))
    correct += torch.eq(*gathered).sum().item()
if accelerator.is_main_process:  # accelerator.print prints once per node
    print(f"accuracy {correct / len(test_set):.2%} ({correct}/{len(test_set)})")
model, optimizer = accelerator.free_memory(model, optimizer)  # DDP goes before its group
accelerator.end_training()
