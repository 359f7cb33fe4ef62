"""Step 5: like step 4, but all ranks evaluate, and each test sample is counted once."""

import argparse
import os
import signal
import time
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but a later import by DDP would keep the process group alive
from sklearn.datasets import load_digits
from sklearn.metrics import classification_report
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

stop_signals = []  # the signal handler adds each SIGTERM, and _stop_agreed counts them


def ddp_setup():
    """Join the process group as the rank that torchrun has set in the environment."""
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)  # from now on, "cuda" is this process's GPU
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"  # NCCL for GPU tensors, gloo for CPU tensors
    dist.init_process_group(backend, device_id=gpu, timeout=timedelta(minutes=5))  # per operation


def load_datasets():
    """Return 1438 scans to train on, each shifted to nine positions, and 359 scans to test on."""
    digits = load_digits()
    scans = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # N x 1 x 8 x 8
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(scans)), test_size=359, random_state=0)
    padded = nn.functional.pad(scans[train], (1, 1, 1, 1))
    shifted = torch.cat([padded[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)])
    return TensorDataset(shifted, labels[train].repeat(9)), TensorDataset(scans[test], labels[test])


def build_model(width):
    """Return a network that maps images (N x 1 x 8 x 8) to logits (N x 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # from 8 x 8 to 4 x 4
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width * 4 * 4, 10),
    )


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that skips a rank's share of the first `samples_run` samples."""

    samples_run = 0

    def __len__(self):  # so that len(loader) is what is left
        return super().__len__() - self.samples_run // self.num_replicas

    def __iter__(self):
        return islice(super().__iter__(), self.samples_run // self.num_replicas, None)


class Trainer:
    def __init__(self, model, train_loader, optimizer, device, args):
        self.model = model
        self.train_loader = train_loader
        self.optimizer = optimizer
        self.device = device
        self.path = args.checkpoint_path
        self.config = {"width": args.width, "lr": args.lr, "seed": args.seed}
        self.epochs_run = 0
        self.samples_run = 0  # in this epoch, by all ranks together
        self.interrupted = False
        if os.path.exists(self.path):
            self._load_checkpoint()
        starts = [None] * dist.get_world_size()  # where each rank starts, filled by the next line
        dist.all_gather_object(starts, f"after epoch {self.epochs_run}, sample {self.samples_run}")
        if len(set(starts)) > 1:  # DDP would copy rank 0's weights, but not its epoch or optimizer
            by_rank = dict(enumerate(starts))
            raise RuntimeError(f"the ranks start {by_rank}: all must see the same {self.path}")
        self.model = DDP(model)  # copies rank 0's weights; backward() averages the gradients

    def _run_batch(self, source, targets):
        source = source.to(self.device, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        return loss.detach() * len(targets)

    def _stop_agreed(self):
        """Return whether any rank got SIGTERM. All ranks have to call this at the same step."""
        votes = torch.tensor(len(stop_signals))  # on the CPU, so item() need not wait for a GPU
        dist.all_reduce(votes)  # now the sum over all ranks
        return votes.item() > 0

    def _run_epoch(self):
        epoch_seed = self.config["seed"] + self.epochs_run  # a resumed epoch gets the same seed
        torch.manual_seed(epoch_seed + 1000 * dist.get_rank())  # different numbers on each rank
        self.train_loader.sampler.set_epoch(self.epochs_run)  # otherwise, the order never changes
        self.train_loader.sampler.samples_run = self.samples_run  # how many to skip
        self.model.train()
        start = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss sum, sample count
        for step, (source, targets) in enumerate(self.train_loader):
            if step % 10 == 0 and self._stop_agreed():  # asking at every step would cost time
                self.interrupted = True
                return
            total[0] += self._run_batch(source, targets)
            total[1] += len(targets)
            self.samples_run += len(targets) * dist.get_world_size()  # equal batches on all ranks
        dist.all_reduce(total)  # the sum over all ranks
        loss, samples = total.tolist()  # waits for the GPU, if any, so read the clock afterwards
        speed = samples / (time.perf_counter() - start)
        log(f"epoch {self.epochs_run + 1}  loss {loss / samples:.4f}  {speed:,.0f} samples/s")

    def _save_checkpoint(self):
        if dist.get_rank() != 0:  # all ranks hold the same weights, so one file is enough
            return
        checkpoint = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": self.epochs_run,
            "SAMPLES_RUN": self.samples_run,
            "CONFIG": self.config,
        }
        with open(f"{self.path}.new", "wb") as file:  # a crash leaves the old file intact
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self.path}.new", self.path)
        if self.interrupted:
            open(f"{self.path}.interrupted", "w").close()  # the batch script then requeues the job

    def _load_checkpoint(self):
        try:
            checkpoint = torch.load(self.path, map_location="cpu", weights_only=True)
            config = checkpoint["CONFIG"]
        except Exception as error:
            raise RuntimeError(f"cannot load {self.path}, move it away: {error!r}") from error
        if config != self.config:
            raise RuntimeError(f"cannot load {self.path}, move it away: it was saved with {config}")
        self.model.load_state_dict(checkpoint["MODEL_STATE"])
        self.optimizer.load_state_dict(checkpoint["OPTIMIZER_STATE"])
        self.epochs_run = checkpoint["EPOCHS_RUN"]
        self.samples_run = checkpoint.get("SAMPLES_RUN", 0)  # scripts 01 to 03 do not save it
        log(f"resuming from {self.path} after epoch {self.epochs_run}")

    def train(self, total_epochs, save_every):
        while self.epochs_run < total_epochs:
            self._run_epoch()
            if self.interrupted:
                self._save_checkpoint()
                log(f"interrupted after {self.samples_run:,} samples of the epoch")
                return
            self.epochs_run += 1
            self.samples_run = 0
            if self.epochs_run % save_every == 0 or self.epochs_run == total_epochs:
                self._save_checkpoint()


def outlive_sigterm(worker_id):
    """Keep a loader worker alive for 60 s after torchrun's SIGTERM, so that training can save."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(60))  # die in 60 s, not now


def prepare_dataloader(data, args):
    sampler = ResumableSampler(data, seed=args.seed)  # shuffles, and pads to equal shares
    return DataLoader(
        data,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=outlive_sigterm,
    )


@torch.inference_mode()
def evaluate(model, test_set, device, args):
    model.eval()
    for buffer in model.buffers():  # none here; BatchNorm's would differ between the ranks
        dist.broadcast(buffer, 0)
    # Each test sample goes to exactly one rank. 359 is a prime, so shares usually differ in size.
    shard = range(dist.get_rank(), len(test_set), dist.get_world_size())
    correct = torch.tensor(0)
    results = []  # a target and a prediction for each sample of the shard
    for source, targets in DataLoader(test_set, args.batch_size, sampler=shard):
        predictions = model(source.to(device)).argmax(dim=1).cpu()
        correct += (predictions == targets).sum()
        results.extend(zip(targets.tolist(), predictions.tolist()))
    dist.all_reduce(correct)  # every rank gets the sum
    gathered = [None] * dist.get_world_size()  # one slot per rank, filled on rank 0 alone
    dist.gather_object(results, gathered if dist.get_rank() == 0 else None)  # any picklable object
    if dist.get_rank() == 0:
        targets = [target for part in gathered for target, _ in part]
        predictions = [prediction for part in gathered for _, prediction in part]
        log(classification_report(targets, predictions))
    log(f"accuracy {correct / len(test_set):.2%} ({correct}/{len(test_set)})")


def train_and_evaluate(device, args):
    train_set, test_set = load_datasets()
    model = build_model(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    trainer = Trainer(model, prepare_dataloader(train_set, args), optimizer, device, args)
    trainer.train(args.total_epochs, args.save_every)
    if not trainer.interrupted:
        evaluate(model, test_set, device, args)  # not the DDP model, which may wait for other ranks
    return trainer.interrupted


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("total_epochs", nargs="?", type=int, default=4)
    parser.add_argument("save_every", nargs="?", type=int, default=1, help="in epochs")
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0, help="to load data, per process")
    parser.add_argument("--checkpoint-path", default="checkpoint.pt")
    args = parser.parse_args()
    if min(args.total_epochs, args.save_every, args.batch_size, args.width) < 1:
        parser.error("total_epochs, save_every, --batch-size and --width must be at least 1")
    if args.num_workers < 0:
        parser.error("--num-workers must be at least 0")
    if not os.access(os.path.dirname(args.checkpoint_path) or ".", os.W_OK):
        parser.error(f"cannot write to the folder of {args.checkpoint_path}")
    return args


@record  # lets torchrun report the traceback of the rank that failed first
def main(args):
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    ddp_setup()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    log(f"world size {dist.get_world_size()} on {name}")
    torch.manual_seed(args.seed)
    interrupted = train_and_evaluate(device, args)
    dist.barrier()  # wait until every rank has finished with the group
    dist.destroy_process_group()
    raise SystemExit(1 if interrupted else 0)  # an interrupted run has not succeeded


if __name__ == "__main__":
    main(parse_args())
