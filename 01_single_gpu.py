"""Step 1: a network learns to read handwritten digits, on one GPU or on the CPU."""

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    def __init__(self, model, train_data, optimizer, device, args):
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.epochs_run = 0

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        return loss.detach() * len(targets)

    def _run_epoch(self, epoch):
        start, samples, losses = time.perf_counter(), len(self.train_data.sampler), 0
        for source, targets in self.train_data:
            losses += self._run_batch(source.to(self.device), targets.to(self.device))
        loss = losses.item() / samples  # item() waits for the GPU, so the clock comes after it
        speed = samples / (time.perf_counter() - start)
        print(f"epoch {epoch}  loss {loss:.4f}  {speed:,.0f} samples/s", flush=True)

    def _save_checkpoint(self):
        new = f"{self.args.checkpoint_path}.new"  # takes the old file's place once it is whole
        try:
            torch.save(self.model.state_dict(), new)
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
            if last or self.epochs_run % self.args.save_every == 0:
                self._save_checkpoint()


def load_train_objs(args):
    torch.manual_seed(args.seed)
    model = DigitReader(args.width).to(memory_format=torch.channels_last)  # faster convolutions
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    return Digits(train=True), Digits(train=False), model, optimizer


def prepare_dataloader(dataset, args):
    return DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=tuple)


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


def parse_args():
    args = parser.parse_args()
    for name in ("total_epochs", "save_every", "batch_size", "lr", "width"):
        if not 0 < getattr(args, name) < float("inf"):
            parser.error(f"{name} must be positive, not {getattr(args, name)}")
    if not os.access(os.path.dirname(args.checkpoint_path) or ".", os.W_OK):
        parser.error(f"no permission or no folder to write {args.checkpoint_path}")
    return args


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set, model, optimizer = load_train_objs(args)
    trainer = Trainer(model, prepare_dataloader(train_set, args), optimizer, device, args)
    trainer.train()
    evaluate(trainer.model, test_set, device, args)


if __name__ == "__main__":
    main(parse_args())
