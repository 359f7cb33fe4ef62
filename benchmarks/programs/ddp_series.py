"""What PyTorch's DDP series ends with, multigpu_torchrun.py, for step 5's data and model.

Written anew, to do what that script does: it saves the weights every few epochs, goes on from them
when started again, and does not evaluate.
"""

import os
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

step5 = import_module("05_gather_eval")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.device = self.gpu_id if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=self.device)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"resuming from snapshot at epoch {self.epochs_run}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        nn.functional.cross_entropy(output, targets, label_smoothing=0.1).backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        print(f"[rank {self.gpu_id}] epoch {epoch}, steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source.to(self.device), targets.to(self.device))

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snapshot, self.snapshot_path)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def main(args):
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(args.seed)
    train_set, _ = step5.load_datasets()
    model = step5.build_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(train_set)
    pin = torch.cuda.is_available()
    train_data = DataLoader(train_set, args.batch_size, pin_memory=pin, sampler=sampler)
    trainer = Trainer(model, train_data, optimizer, args.save_every, args.checkpoint_path)
    trainer.train(args.total_epochs)
    dist.barrier()
    del trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    main(step5.parse_args())
