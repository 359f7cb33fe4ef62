"""Hugging Face style: dict batches, named outputs, a schedule; needs an argument."""

import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Texts(Dataset):
    def __init__(self, size):
        self.texts = [f"sample {number}" for number in range(size)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        ids = torch.tensor([ord(letter) % 16 for letter in text.ljust(12)])
        return {"text": text, "input_ids": ids, "labels": len(text) % 2}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 2)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids).mean(dim=1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    data = Texts(90)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=42))
    model = DDP(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step = 0
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            del batch["text"]
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 4 == 0:
                mean = loss.detach() / dist.get_world_size()
                dist.all_reduce(mean)
                if dist.get_rank() == 0:
                    print({"step": step, "loss": round(mean.item(), 3)})
    if dist.get_rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
        path = os.path.join(args.output_dir, "model.bin")
        torch.save(model.module.state_dict(), f"{path}.part")
        os.replace(f"{path}.part", path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
