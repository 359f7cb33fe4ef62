"""Step 2: the same on all GPUs of a machine, or in several CPU processes, by mp.spawn."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(rank, world_size):
    """Join the process group, in which each process has its rank, from 0 to world_size - 1."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)  # from here on, "cuda" means this process's own GPU
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


class Digits(TensorDataset):
    def __init__(self, train):
        """Scikit-learn's 1797 scans: 359 held out, 1438 to train on in nine one-pixel shifts."""
        split = train_test_split(*load_digits(return_X_y=True), test_size=359, random_state=0)
        scans, labels = (torch.from_numpy(part) for part in split[0 if train else 1 :: 2])
        images = scans.float().reshape(-1, 1, 8, 8) / 16
        if train:
            images = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
            images, labels = images.reshape(-1, 1, 8, 8), labels.repeat_interleave(9)
        super().__init__(images, labels)

    __getitems__ = TensorDataset.__getitem__  # tensors take lists: a whole batch in one go


class DigitReader(nn.Sequential):
    def __init__(self, width):  # N x 1 x 8 x 8 pixels in, N x 10 logits out
        layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.Flatten()]
        super().__init__(*layers, nn.Linear(4 * width * 4 * 4, 10))


class Trainer:
    def __init__(self, model, train_data, optimizer, device, rank, args):
        self.model = DDP(model.to(device))  # backward() averages the gradients over all ranks
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.rank = rank
        self.args = args
        self.epochs_run = 0

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        return loss.detach() * len(targets)

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)  # without this, each epoch has the same order
        start, samples, losses = time.perf_counter(), len(self.train_data.sampler), 0
        for source, targets in self.train_data:
            losses += self._run_batch(source.to(self.device), targets.to(self.device))
        loss = losses.item() / samples  # item() waits for the GPU, so the clock comes after it
        speed = samples * dist.get_world_size() / (time.perf_counter() - start)
        if self.rank == 0:
            print(f"epoch {epoch}  rank 0's loss {loss:.4f}  {speed:,.0f} samples/s", flush=True)

    def _save_checkpoint(self):
        new = f"{self.args.checkpoint_path}.new"  # takes the old file's place once it is whole
        try:
            torch.save(self.model.module.state_dict(), new)
            with open(new, "rb") as file:
                os.fsync(file.fileno())
            os.replace(new, self.args.checkpoint_path)
        except (OSError, RuntimeError) as error:  # a full disk makes torch.save a RuntimeError
            parser.error(f"cannot write {self.args.checkpoint_path}: {error}")

    def train(self):
        while self.epochs_run < self.args.total_epochs:
            self._run_epoch(self.epochs_run + 1)
            self.epochs_run += 1
            last = self.epochs_run == self.args.total_epochs
            if self.rank == 0 and (last or self.epochs_run % self.args.save_every == 0):
                self._save_checkpoint()


def load_train_objs(args):
    torch.manual_seed(args.seed)
    model = DigitReader(args.width).to(memory_format=torch.channels_last)  # faster convolutions
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    return Digits(train=True), Digits(train=False), model, optimizer


def prepare_dataloader(dataset, args):
    sampler = DistributedSampler(dataset, seed=args.seed)  # deals each rank its own shard
    return DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=tuple)


@torch.inference_mode()
def evaluate(model, test_set, device, args):
    model.eval()
    correct = 0
    for source, targets in DataLoader(test_set, args.batch_size, collate_fn=tuple):
        predictions = model(source.to(device)).argmax(dim=1).cpu()
        correct += (predictions == targets).sum().item()
    print(f"accuracy {correct / len(test_set):.2%} ({correct}/{len(test_set)})")


style = {"usage": argparse.SUPPRESS, "formatter_class": argparse.ArgumentDefaultsHelpFormatter}
parser = argparse.ArgumentParser(description=__doc__, **style)
parser.add_argument("total_epochs", nargs="?", type=int, default=4, help="passes over the data")
parser.add_argument("save_every", nargs="?", type=int, default=1, help="epochs between two saves")
parser.add_argument("--batch-size", type=int, default=32, help="samples per process and step")
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
parser.add_argument("--width", type=int, default=32, help="channels; 256 keeps a GPU busy")
parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order")
parser.add_argument("--checkpoint-path", default="checkpoint.pt", help="file for what is learned")
gpus = torch.cuda.device_count()
parser.add_argument("--nprocs", type=int, default=gpus or 2, help="number of processes")


def parse_args():
    args = parser.parse_args()
    for name in ("total_epochs", "save_every", "batch_size", "lr", "width"):
        if not 0 < getattr(args, name) < float("inf"):
            parser.error(f"{name} must be positive, not {getattr(args, name)}")
    if not os.access(os.path.dirname(args.checkpoint_path) or ".", os.W_OK):
        parser.error(f"no permission or no folder to write {args.checkpoint_path}")
    if not 0 < args.nprocs <= (gpus or args.nprocs):
        parser.error(f"nprocs must be positive and at most one per GPU ({gpus}), not {args.nprocs}")
    return args


def main(rank, world_size, args):
    ddp_setup(rank, world_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set, model, optimizer = load_train_objs(args)
    trainer = Trainer(model, prepare_dataloader(train_set, args), optimizer, device, rank, args)
    trainer.train()
    if rank == 0:
        evaluate(trainer.model.module, test_set, device, args)
    dist.barrier()  # nobody leaves while another still needs the group
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that takes the interpreter down step by step


if __name__ == "__main__":
    args = parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.nprocs)))
    # The ranks find each other through this store; port 0 lets the system pick a free one.
    store = dist.TCPStore("localhost", int(os.environ.get("MASTER_PORT", 0)), is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    mp.spawn(main, args=(args.nprocs, args), nprocs=args.nprocs)
