"""Measure what single lines of the scripts gain or cost: train with and without each, in turn.

    python benchmarks/lines.py                                      one process
    torchrun --standalone --nproc-per-node=2 benchmarks/lines.py    two ranks

The speed of a machine drifts within seconds. So each round takes all pairs of variants in random
order and trains both of a pair, one right after the other, on a third of the samples. The result
is the median of the ratios with their quartiles.

With two ranks, steps 2 and 5 are also compared with copies of step 1 in the same processes, which
never communicate: the most that these cores can do.
"""

import contextlib
import os
import random
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from shared import cell, load, middle, parser_of, positive_int, prepared, table, write

RANKS = int(os.environ.get("WORLD_SIZE", "0"))
STEP = "05" if RANKS else "01"  # the script whose lines are changed
PART = 3  # train on every third sample: an epoch is long enough for two votes
LOADER = "data, args.batch_size, "
FORWARD = "loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)"
ADAMW = "lr=args.lr)"
BUILD = "build_model(args.width)"
ADD = "total[0] += self._run_batch(source, targets)"
DDP = "DDP(model"
WRAP = "self.model = DDP(model)"
ASK = "step % 10 == 0 and self._stop_agreed()"
OWN = """class Own(nn.Sequential):
    def forward(self, images):
        for layer in self:
            images = layer(images)
        return images


"""

# The variants: a name, and what to replace in the script: [(old, new)].
ANYWHERE = {
    "channels-last": [(f"{BUILD}.to(", f"{BUILD}.to(memory_format=torch.channels_last).to(")],
    "AdamW fused": [(ADAMW, "lr=args.lr, fused=True)")],
    "AdamW with foreach": [(ADAMW, "lr=args.lr, foreach=True)")],
    "one loader worker": [(LOADER, f"{LOADER}num_workers=1, persistent_workers=True, ")],
    "bf16 autocast": [
        (FORWARD, f"with torch.autocast(source.device.type, torch.bfloat16): {FORWARD}")
    ],
    "torch.compile": [(BUILD, f"torch.compile({BUILD}, dynamic=False)")],
    "loss not summed": [(ADD, "self._run_batch(source, targets)")],
}
BETWEEN_RANKS = {
    "find_unused_parameters": [(DDP, f"{DDP}, find_unused_parameters=True")],
    "gradient_as_bucket_view": [(DDP, f"{DDP}, gradient_as_bucket_view=True")],
    "no vote": [(ASK, "False")],
    "a vote in each step": [(ASK, "self._stop_agreed()")],
    "torch.compile after DDP, a model of our own class": [
        (WRAP, "self.model = torch.compile(DDP(model), dynamic=False)"),
        (BUILD, f"Own(*{BUILD})"),
        ("def load_datasets", f"{OWN}def load_datasets"),
    ],
}
# ---------------------------------------------------------------- what is timed


class Run:
    """A script or a variant of one, ready to train. Each method returns its number of samples."""

    def __init__(self, step, words, changes=(), threads=None):
        self.threads = threads
        self.trainer = prepared(step, words, changes, PART)

    def train(self):
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        self.trainer.samples_run = 0
        self.trainer._run_epoch()
        self.trainer.epochs_run += 1
        torch.set_num_threads(threads)
        return len(self.trainer.train_loader.sampler)

    def train_on_rank_0(self):
        """Train on rank 0; the other ranks wait, and leave their cores to it."""
        return self.train() if dist.get_rank() == 0 else 0

    def save(self):
        """Save on rank 0. Return the samples of an epoch, to compare the time of both."""
        if RANKS and dist.get_rank() > 0:
            return 0
        self.trainer._save_checkpoint()
        return len(self.trainer.train_loader.sampler) * PART * max(RANKS, 1)


def planned(words):
    """Return {name: a function to time}, and pairs of names to compare."""
    step = Run(STEP, words)
    runs, pairs = {STEP: step.train, "a save": step.save}, [("a save", STEP)]
    if RANKS:
        runs["01 with as many threads"] = Run("01", words, threads=RANKS).train_on_rank_0
        runs |= {"copies of 01": Run("01", words).train, "02": Run("02", words).train}
        pairs += [("02", "01 with as many threads"), ("02", "copies of 01"), (STEP, "copies of 01")]
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # torch.compile needs it
    for name, changes in (ANYWHERE | (BETWEEN_RANKS if RANKS else {})).items():
        if compiler or "torch.compile(" not in str(changes):
            runs[name] = Run(STEP, words, changes).train
            pairs.append((name, STEP))
    runs["2 threads per process"] = Run(STEP, words, threads=2).train
    return runs, [*pairs, ("2 threads per process", STEP)]


# ---------------------------------------------------------------- measuring


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


def measure(runs, pairs, seconds):
    """Time all pairs in turn; return {name: [samples/s]} and {pair: [ratio of each round]}."""
    for function in runs.values():
        speed(function)  # a warm-up
    found, ratios = {name: [] for name in runs}, {pair: [] for pair in pairs}
    choose = random.Random(0)  # the same order on all ranks
    end = time.monotonic() + seconds
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


def report(record):
    """Return the ratios as a Markdown table; a save as a share of an epoch."""
    form = {"a save": ".1%"}
    rows = [
        (r["name"], r["against"], cell(r, form.get(r["name"], ".2f"))) for r in record["ratios"]
    ]
    return table(("samples/s of", "relative to", "ratio (quartiles)"), *rows)


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=positive_int, default=128, help="per process")
    parser.add_argument("--width", type=positive_int, default=32, help="of the model; 256 for GPUs")
    parser.add_argument("--seconds", type=positive_int, default=300, help="at least")
    return parser.parse_args()


def main():
    args = parse_args()
    if RANKS:
        load("05").ddp_setup()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--batch-size={args.batch_size}", f"--width={args.width}"]
        words += [f"--checkpoint-path={folder}/checkpoint.pt"]
        runs, pairs = planned(words)
        found, ratios = measure(runs, pairs, args.seconds)
    if not RANKS or dist.get_rank() == 0:
        # For a save, the ratio of times: the share of an epoch that it takes.
        ratios = {p: [1 / r if p[0] == "a save" else r for r in own] for p, own in ratios.items()}
        rows = [{"name": a, "against": b, **middle(own)} for (a, b), own in ratios.items()]
        found = {"processes": RANKS or 1, "ratios": rows, "samples_per_second": found}
        write(f"lines-{RANKS or 1}-of-{args.batch_size}", args, report, **found)
    if RANKS:
        dist.barrier()
        del runs  # and with them DDP, before the group that it uses
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
