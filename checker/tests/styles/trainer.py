"""The Hugging Face Trainer, with an evaluation of a set that does not divide by the world size."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Points(Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].argmax()}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    arguments = TrainingArguments(
        "out",
        num_train_epochs=2,
        per_device_train_batch_size=10,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        Classifier(), arguments, train_dataset=Points(80, 0), eval_dataset=Points(21, 1)
    )
    trainer.train()


if __name__ == "__main__":
    main()
