"""Measure what single lines of the scripts gain or cost: train with and without each, in turn.

    python benchmarks/lines.py                                      one process
    torchrun --standalone --nproc-per-node=2 benchmarks/lines.py    two ranks

The speed of a machine drifts within seconds. So each round takes all pairs of variants in random
order and trains the two of a pair one right after the other, on a third of the samples. The result
is the median of the ratios with their quartiles.

Two baselines show how much is left to gain: for one process a bare loop over batches that are
already in memory; for several ranks as many copies of step 1 in the same processes, which never
communicate, and the same copies with one all-reduce of the gradients per step whose result is not
used.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from shared import cell, load, machine, middle, positive_int, prepared, table

RANKS = int(os.environ.get("WORLD_SIZE", "0"))
STEP = "05" if RANKS else "01"  # the script whose lines are changed
PART = 3  # train on every third sample: an epoch is long enough for two votes
TESTS = 20  # evaluate the test set so many times over
LOADER = "pin_memory=pin"
DATASET = "class TensorDataset(TensorDataset):\n    __getitems__ = TensorDataset.__getitem__\n\n\n"
FORWARD = "loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)"
BACKWARD = "loss.backward()"
SUM = "dist.all_reduce(torch.cat([p.grad.flatten() for p in self.model.parameters()]))"
DDP = "DDP(model"
WRAP = "self.model = DDP(model)"
COMPILED = "self.model = torch.compile(DDP(model), dynamic=False)"
OWN = """class Own(nn.Sequential):
    def forward(self, images):
        for layer in self:
            images = layer(images)
        return images


"""
BUILD = "build_model(args.width)"
ASK = "step % 10 == 0 and self._stop_agreed()"
VOTE = """        votes = told_to_stop.clone()
        dist.all_reduce(votes)
        return votes.item() > 0
"""
ASYNCHRONOUS = """        pending = getattr(self, "pending", None)
        agreed = pending is not None and pending.wait() and self.votes.item() > 0
        self.votes = told_to_stop.clone()
        self.pending = dist.all_reduce(self.votes, async_op=True)
        return agreed
"""

# The variants: a name, and what replaces what in the script.
ANYWHERE = {
    "not channels-last": [(", memory_format=torch.channels_last", "")],
    "AdamW not fused": [(", fused=True", "")],
    "AdamW with foreach": [("fused=True", "foreach=True")],
    "batches fetched at once": [
        ("def load_datasets", f"{DATASET}def load_datasets"),
        (LOADER, f"{LOADER}, collate_fn=tuple"),
    ],
    "one loader worker": [(LOADER, f"{LOADER}, num_workers=1, persistent_workers=True")],
    "bf16 autocast": [
        (FORWARD, f"with torch.autocast(source.device.type, torch.bfloat16): {FORWARD}")
    ],
    "torch.compile": [(BUILD, f"torch.compile({BUILD}, dynamic=False)")],
}
BETWEEN_RANKS = {
    "find_unused_parameters": [(DDP, f"{DDP}, find_unused_parameters=True")],
    "gradient_as_bucket_view": [(DDP, f"{DDP}, gradient_as_bucket_view=True")],
    "no vote": [(ASK, "False")],
    "a vote in each step": [(ASK, "self._stop_agreed()")],
    "an asynchronous vote": [(VOTE, ASYNCHRONOUS)],
    "torch.compile after DDP": [(WRAP, COMPILED)],
    "the same, with a model of our own class": [
        (WRAP, COMPILED),
        (BUILD, f"Own(*{BUILD})"),
        ("def load_datasets", f"{OWN}def load_datasets"),
    ],
}
ON_GPUS = {
    "pageable memory, blocking copies": [(LOADER, "pin_memory=False"), (", non_blocking=True", "")],
    "item() in each step": [("loss.detach()", "loss.item()")],
}
SUMMING = [("import torch\n", "import torch\nimport torch.distributed as dist\n")]
SUMMING += [(BACKWARD, f"{BACKWARD}; {SUM}")]


# ---------------------------------------------------------------- what is timed


class Run:
    """A script or a variant of one, ready to train. Each method returns how many samples it ran."""

    def __init__(self, step, words, changes=(), threads=None):
        self.threads = threads
        self.script, self.args, self.trainer, self.test_set = prepared(step, words, changes, PART)

    def train(self):
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        self.trainer.samples_run = 0
        self.trainer._run_epoch()
        self.trainer.epochs_run += 1
        torch.set_num_threads(threads)
        return len(self.trainer.train_data.sampler)

    def train_on_rank_0(self):
        """Train in one process; the others wait, and leave it their cores."""
        return self.train() if dist.get_rank() == 0 else 0

    def train_bare(self):
        """Run the training steps alone; the first call fetches the batches."""
        trainer = self.trainer
        if not hasattr(self, "batches"):
            self.batches = [[x.to(trainer.device) for x in pair] for pair in trainer.train_data]
        for source, targets in self.batches:
            trainer.optimizer.zero_grad()
            logits = trainer.model(source)
            loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
            loss.backward()
            trainer.optimizer.step()
        loss.item()
        return sum(len(targets) for _, targets in self.batches)

    def save(self):
        """Save on rank 0. The samples returned are those of an epoch, to compare the times."""
        if RANKS and dist.get_rank() > 0:
            return 0
        self.trainer._save_checkpoint()
        return len(self.trainer.train_data.sampler) * PART * (RANKS or 1)

    def evaluate(self):
        """Evaluate on the test set, many times over: together in step 5, each rank in step 1."""
        if len(self.test_set) == 359:
            many = (part.repeat(TESTS, *[1] * (part.dim() - 1)) for part in self.test_set.tensors)
            self.test_set.tensors = tuple(many)
        model = getattr(self.trainer.model, "module", self.trainer.model)
        self.script.evaluate(model, self.test_set, self.trainer.device, self.args)
        return len(self.test_set) / (1 if model is self.trainer.model else RANKS)


def speed(function):
    """Call a function on all ranks at once; return the sum of their samples/s."""
    if RANKS:
        dist.barrier()
    start = time.perf_counter()
    with contextlib.redirect_stdout(None):
        samples = function()
    total = torch.tensor(samples / (time.perf_counter() - start), dtype=torch.float64)
    if RANKS:
        dist.all_reduce(total)
    return total.item()


def plan(words, baselines_only):
    """Return {name: a function to time} and the pairs of names whose speeds are compared."""
    step, single = Run(STEP, words), Run("01", words)
    runs, pairs = {STEP: step.train}, []
    if RANKS:
        threads = Run("01", words, threads=RANKS)
        runs |= {"copies of 01": single.train, "copies that sum": Run("01", words, SUMMING).train}
        runs |= {name: Run(name, words).train for name in ("02", "04")}
        runs |= {"01 with as many threads": threads.train_on_rank_0}
        pairs += [("02", "01 with as many threads"), ("copies that sum", "copies of 01")]
        pairs += [(name, other) for name in ("02", "04") for other in list(runs)[1:3]]
        if baselines_only:
            return runs, pairs
        runs |= {"evaluation by 05": step.evaluate, "evaluation by copies of 01": single.evaluate}
        pairs += [("evaluation by 05", "evaluation by copies of 01")]
    else:
        runs |= {"bare loop": single.train_bare}
        pairs += [(STEP, "bare loop")]
    runs |= {"a save": step.save}
    tried = ANYWHERE | (BETWEEN_RANKS if RANKS else {})
    tried |= ON_GPUS if torch.cuda.is_available() else {}
    if not shutil.which(os.environ.get("CXX", "g++")):  # torch.compile needs it
        tried = {name: c for name, c in tried.items() if "torch.compile(" not in str(c)}
    variants = {name: Run(STEP, words, changes).train for name, changes in tried.items()}
    variants["2 threads per process"] = Run(STEP, words, threads=2).train
    pairs += [(name, STEP) for name in ("a save", *variants)]
    pairs += [pair for pair in pairs if pair[0] == "no vote"] * 2  # small: measure it thrice
    return runs | variants, pairs


# ---------------------------------------------------------------- measuring


def parse_args():
    style = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **style)
    parser.add_argument("--batch-size", type=positive_int, default=128, help="per process")
    parser.add_argument("--width", type=positive_int, default=32, help="of the model; 256 for GPUs")
    parser.add_argument("--seconds", type=positive_int, default=300, help="then end the last round")
    parser.add_argument("--baselines", action="store_true", help="leave out the changed lines")
    return parser.parse_args()


def measure(args):
    """Time all pairs in turn; return {name: [samples/s]} and {pair: [ratio of each round]}."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--batch-size={args.batch_size}", f"--width={args.width}"]
        words += [f"--checkpoint-path={folder}/checkpoint.pt"]
        runs, pairs = plan(words, args.baselines)
        for function in runs.values():
            speed(function)  # a warm-up
        found, ratios = {name: [] for name in runs}, {pair: [] for pair in pairs}
        choose = random.Random(0)  # the same order on all ranks
        end = time.monotonic() + args.seconds
        while True:
            for pair in choose.sample(pairs, len(pairs)):
                for name in choose.sample(pair, 2):
                    found[name].append(round(speed(runs[name])))
                ratios[pair].append(found[pair[0]][-1] / found[pair[1]][-1])
            over = torch.tensor(time.monotonic() > end)
            if RANKS:
                dist.broadcast(over, src=0)
            if over:
                return found, ratios


def main():
    args = parse_args()
    if RANKS:
        load("04").ddp_setup()
    found, ratios = measure(args)
    if not RANKS or dist.get_rank() == 0:
        # For a save, a ratio of times: its share of an epoch.
        ratios = {p: [1 / r if p[0] == "a save" else r for r in own] for p, own in ratios.items()}
        rows = [{"name": a, "against": b, **middle(own)} for (a, b), own in ratios.items()]
        cells = [(row["name"], row["against"], cell(row, ".3f")) for row in rows]
        print(table(("", "against", "ratio of speeds"), *cells))
        record = {"machine": machine(), "options": vars(args), "processes": RANKS or 1}
        record |= {"ratios": rows, "samples_per_second": found}
        path = Path(f"lines-{RANKS or 1}-of-{args.batch_size}.json")
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if RANKS:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
