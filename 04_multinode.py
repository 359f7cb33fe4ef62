"""Step 4: the same on many nodes, by one torchrun on each; they may be preempted, come and go."""

import argparse
import os
import signal
import sys
import time
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(local_rank):
    """Join the process group, in which each process has its rank, from 0 to world_size - 1."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)  # from here on, "cuda" means this process's own GPU
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))  # a lost node is no hang


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


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that begins after the samples that all ranks together have run."""

    samples_run = 0

    def __iter__(self):
        # A world of another size keeps this order, but takes it in larger or smaller steps.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        order += order[: (self.samples_run - len(order)) % self.num_replicas]  # the padding
        return iter(order[self.samples_run + self.rank :: self.num_replicas])

    def __len__(self):
        return (len(self.dataset) - self.samples_run + self.num_replicas - 1) // self.num_replicas


class Trainer:
    def __init__(self, model, train_data, optimizer, device, rank, args):
        self.model = DDP(model.to(device))  # backward() averages the gradients over all ranks
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.rank = rank
        self.args = args
        self.epochs_run = 0
        self.agent = os.getppid()
        self.samples_run = 0  # of the epoch, by all ranks together
        self.told_to_stop, self.vote = torch.zeros(1), None
        signal.signal(signal.SIGTERM, lambda *_: self.told_to_stop.fill_(1))
        self.config = {"format": 2, "width": args.width, "lr": args.lr, "seed": args.seed}
        if os.path.exists(args.checkpoint_path):
            self._load_checkpoint()

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        return loss.detach() * len(targets)

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)  # without this, each epoch has the same order
        self.train_data.sampler.samples_run = self.samples_run
        start, samples, losses = time.perf_counter(), len(self.train_data.sampler), 0
        for step, (source, targets) in enumerate(self.train_data):
            losses += self._run_batch(source.to(self.device), targets.to(self.device))
            self.samples_run += len(targets) * dist.get_world_size()
            if step % 10 == 0 and self._stop_agreed():  # if your steps take seconds: each step
                self._leave()
        loss = losses.item() / samples  # item() waits for the GPU, so the clock comes after it
        speed = samples * dist.get_world_size() / (time.perf_counter() - start)
        if self.rank == 0:
            print(f"epoch {epoch}  rank 0's loss {loss:.4f}  {speed:,.0f} samples/s", flush=True)

    def _stop_agreed(self):
        """Tell all ranks after the same step if any was told to stop; costs 0.3 % of the time."""
        agreed = self.vote and self.vote.wait() and self.ballot.any()  # over since: nobody waits
        self.ballot = self.told_to_stop + (os.getppid() != self.agent)
        self.vote = dist.all_reduce(self.ballot, dist.ReduceOp.MAX, async_op=True)
        return agreed and self.samples_run < len(self.train_data.dataset)

    def _leave(self):
        """Save in mid-epoch, leave a file to tell of it, and end with exit code 75: try again."""
        if self.rank == 0:
            self._save_checkpoint()
            Path(f"{self.args.checkpoint_path}.interrupted").touch()
            print(f"interrupted after {self.samples_run:,} samples of the epoch", flush=True)
        dist.barrier()
        os._exit(os.EX_TEMPFAIL)

    def _save_checkpoint(self):
        checkpoint = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "SAMPLES_RUN": self.samples_run,
            "CONFIG": self.config,
        }
        new = f"{self.args.checkpoint_path}.new"  # takes the old file's place once it is whole
        try:
            torch.save(checkpoint, new)
            with open(new, "rb") as file:
                os.fsync(file.fileno())
            os.replace(new, self.args.checkpoint_path)
        except (OSError, RuntimeError) as error:  # a full disk makes torch.save a RuntimeError
            parser.error(f"cannot write {self.args.checkpoint_path}: {error}")

    def _load_checkpoint(self):
        path = self.args.checkpoint_path
        try:
            archive = zipfile.ZipFile(path)  # torch.load checks no sums, and skips "folders"
            if archive.testzip() or any(part.external_attr for part in archive.infolist()):
                raise ValueError("it is damaged")
            checkpoint = torch.load(path, map_location=self.device, weights_only=True)
            if checkpoint["CONFIG"] != self.config:
                raise ValueError(f"it is of {checkpoint['CONFIG']}, this run of {self.config}")
            self.model.module.load_state_dict(checkpoint["MODEL_STATE"])
            self.optimizer.load_state_dict(checkpoint["OPTIMIZER_STATE"])
            self.epochs_run = checkpoint["EPOCHS_RUN"]
            self.samples_run = checkpoint["SAMPLES_RUN"]
        except Exception as error:
            parser.error(f"cannot resume from {path}, move it away or name another: {error!r:.200}")
        if self.rank == 0:
            Path(f"{path}.interrupted").unlink(missing_ok=True)
            print(f"{path}: {self.epochs_run} of {self.args.total_epochs} epochs run", flush=True)
        # DDP lays its gradients out anew after the first backward pass, and other layouts add up
        # in another order. This idle pass makes the next step that of a run never interrupted.
        self.model(torch.zeros(1, 1, 8, 8, device=self.device)).sum().backward()
        self.optimizer.zero_grad()

    def train(self):
        while self.epochs_run < self.args.total_epochs:
            self._run_epoch(self.epochs_run + 1)
            self.epochs_run, self.samples_run = self.epochs_run + 1, 0
            last = self.epochs_run == self.args.total_epochs
            if self.rank == 0 and (last or self.epochs_run % self.args.save_every == 0):
                self._save_checkpoint()


def load_train_objs(args):
    torch.manual_seed(args.seed)
    model = DigitReader(args.width).to(memory_format=torch.channels_last)  # faster convolutions
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    return Digits(train=True), Digits(train=False), model, optimizer


def prepare_dataloader(dataset, args):
    sampler = ResumableSampler(dataset, seed=args.seed)  # deals each rank its own shard
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


def parse_args():
    args = parser.parse_args()
    for name in ("total_epochs", "save_every", "batch_size", "lr", "width"):
        if not 0 < getattr(args, name) < float("inf"):
            parser.error(f"{name} must be positive, not {getattr(args, name)}")
    if not os.access(os.path.dirname(args.checkpoint_path) or ".", os.W_OK):
        parser.error(f"no permission or no folder to write {args.checkpoint_path}")
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.error(f"start it with: torchrun --standalone --nproc-per-node=2 {parser.prog}")
    if 0 < gpus <= int(os.environ["LOCAL_RANK"]):
        parser.error(f"--nproc-per-node must be at most {gpus}, one process per GPU")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        parser.error("--max-restarts needs: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    return args


@record  # gives torchrun the traceback, for its report on who failed first
def main(args):
    ddp_setup(int(os.environ["LOCAL_RANK"]))  # counted on each node: tells the GPU
    rank = int(os.environ["RANK"])  # the global rank, counted over all nodes: tells all the rest
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
    main(parse_args())
