"""Step 5 with the Hugging Face Trainer; see frameworks.md."""

import glob
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

step5 = import_module("05_gather_eval")
args = step5.parse_args()


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = step5.build_model(args.width)

    def forward(self, source, labels):
        logits = self.layers(source)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


def collate(samples):
    sources, labels = zip(*samples)
    return {"source": torch.stack(sources), "labels": torch.stack(labels)}


def count(evaluated):
    correct = (evaluated.predictions.argmax(axis=1) == evaluated.label_ids).sum()
    return {"correct": int(correct), "total": len(evaluated.label_ids)}


arguments = TrainingArguments(
    f"{args.checkpoint_path}.trainer",
    num_train_epochs=args.total_epochs,
    per_device_train_batch_size=args.batch_size,
    per_device_eval_batch_size=args.batch_size,
    learning_rate=args.lr,
    seed=args.seed,
    save_strategy="epoch",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
train_set, test_set = step5.load_datasets()
trainer = Trainer(
    Digits(),
    arguments,
    data_collator=collate,
    train_dataset=train_set,
    eval_dataset=test_set,
    compute_metrics=count,
)
trainer.train(resume_from_checkpoint=bool(glob.glob(f"{arguments.output_dir}/checkpoint-*")))
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    correct, total = metrics["eval_correct"], metrics["eval_total"]
    print(f"accuracy {correct / total:.2%} ({correct}/{total})")
dist.barrier()
del trainer  # DDP goes before its process group
dist.destroy_process_group()
