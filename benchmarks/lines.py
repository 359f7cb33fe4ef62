"""What each line of the scripts buys: real training with it and without it, in turn.

    python benchmarks/lines.py                                      one process
    torchrun --standalone --nproc-per-node=2 benchmarks/lines.py    ranks that talk

Every round takes each pair of variants, in random order, and trains one right after the other on a
quarter of the samples, as the speed of a machine drifts within seconds; the table shows medians of
the ratios, and quartiles. The limits are programs that do less: one process is held against a
bare loop over batches that are in memory already; ranks against copies of step 1 that train in the
same processes at the same time and never talk, and against such copies that sum up their gradients
once a step, and do nothing with the sum.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from shared import machine, middle
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RANKS = int(os.environ.get("WORLD_SIZE", "0"))
LAST = "05" if RANKS else "01"  # the script whose lines are tried out
COLLATE, TO = "collate_fn=tuple", ".to(self.device)"
NHWC, FUSED, DDP = ".to(memory_format=torch.channels_last)", ", fused=True", "DDP(model.to(device)"
FORWARD = "loss = nn.functional.cross_entropy(self.model(source), targets, label_smoothing=0.1)"
BACKWARD, VOTE = "loss.backward()", "step % 10 == 0 and self._stop_agreed()"
SUM = "dist.all_reduce(torch.cat([p.grad.flatten() for p in self.model.parameters()]))"
TALK = [("import torch\n", "import torch\nimport torch.distributed as dist\n")]
TALK += [(BACKWARD, f"{BACKWARD}; {SUM}")]

# What is tried: the name, and what stands in the script in place of what.
ANYWHERE = {
    "not channels-last": [(NHWC, "")],
    "AdamW not fused": [(FUSED, "")],
    "AdamW with foreach": [(FUSED, ", foreach=True")],
    "samples fetched one by one": [(f", {COLLATE}", ""), ("    __getitems__ =", "    unused =")],
    "a loader worker": [(COLLATE, f"{COLLATE}, num_workers=1, persistent_workers=True")],
    "item() in each step": [("loss.detach()", "torch.tensor(loss.item())")],
    "zero_grad(set_to_none=False)": [("zero_grad()", "zero_grad(set_to_none=False)")],
    "torch.compile": [("model.to(device)", "torch.compile(model.to(device))")],
    "bf16 autocast": [
        (FORWARD, f"with torch.autocast(source.device.type, torch.bfloat16): {FORWARD}")
    ],
}
ON_GPUS = {
    "pinned memory, non-blocking copies": [
        (COLLATE, f"{COLLATE}, pin_memory=True"),
        (TO, ".to(self.device, non_blocking=True)"),
    ],
    "TF32": [("style = {", 'torch.set_float32_matmul_precision("high")\nstyle = {')],
}
BETWEEN_RANKS = {
    "gradient_as_bucket_view": [(DDP, f"{DDP}, gradient_as_bucket_view=True")],
    "static_graph": [(DDP, f"{DDP}, static_graph=True")],
    "buckets of 0.1 MB": [(DDP, f"{DDP}, bucket_cap_mb=0.1")],
    "find_unused_parameters": [(DDP, f"{DDP}, find_unused_parameters=True")],
    "a vote in each step": [(VOTE, "self._stop_agreed()")],
    "no vote": [(VOTE, "False")],
}


def load(step, changes=()):
    """Import a step's script with some of its text changed."""
    (path,) = ROOT.glob(f"{step}_*.py")
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        if old not in text:
            raise SystemExit(f"{path.name} has no {old!r}")
        text = text.replace(old, new)
    module = ModuleType(path.stem)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


# ---------------------------------------------------------------- what is timed


class Run:
    """A script or a variant of one, ready to train; each method returns the samples it has run."""

    def __init__(self, step, words, changes=(), threads=None, core=None):
        self.script, self.threads, self.core = load(step, changes), threads, core
        self.args = self.script.parser.parse_args(words)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        train_set, self.test_set, model, optimizer = self.script.load_train_objs(self.args)
        train_set.tensors = tuple(part[::4] for part in train_set.tensors)
        data = self.script.prepare_dataloader(train_set, self.args)
        rank = () if step == "01" else (dist.get_rank(),)
        self.trainer = self.script.Trainer(model, data, optimizer, self.device, *rank, self.args)
        self.samples, self.epoch = len(data.sampler), 0

    def train(self):
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        self.epoch, self.trainer.samples_run = self.epoch + 1, 0
        with bound_to(self.core):
            self.trainer._run_epoch(self.epoch)
        torch.set_num_threads(threads)
        return self.samples

    def train_bare(self):
        """Do the steps alone; the first call fetches the batches."""
        if not self.epoch:
            data = self.trainer.train_data
            self.epoch, self.batches = 1, [[x.to(self.device) for x in batch] for batch in data]
        model, optimizer = self.trainer.model, self.trainer.optimizer
        for source, targets in self.batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(source), targets, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
        loss.item()
        return self.samples

    def save(self):
        """Save on rank 0; what is returned compares its time with that of a whole epoch."""
        if RANKS and dist.get_rank() > 0:
            return 0
        self.trainer._save_checkpoint()
        return 4 * self.samples * (RANKS or 1)

    def evaluate(self):
        """Read the held-out digits fifty times over."""
        if len(self.test_set) == 359:
            many = (part.repeat(50, *[1] * (part.dim() - 1)) for part in self.test_set.tensors)
            self.test_set.tensors = tuple(many)
        model = getattr(self.trainer.model, "module", self.trainer.model)
        self.script.evaluate(model, self.test_set, self.device, self.args)
        model.train()
        return len(self.test_set) / (1 if model is self.trainer.model else RANKS)


@contextlib.contextmanager
def bound_to(core):
    """Keep this thread on one core, if one is given."""
    if core is None:
        yield
        return
    free = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    yield
    os.sched_setaffinity(0, free)


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


def plan(words):
    """Return {name: a function to time} and the pairs of names whose speeds are compared."""
    own, limit = Run(LAST, words), Run("01", words)
    runs, pairs = {LAST: own.train, "a save": own.save}, [("a save", LAST)]
    tried = ANYWHERE | (BETWEEN_RANKS if RANKS else {})
    tried |= ON_GPUS if torch.cuda.is_available() else {}
    if not shutil.which("g++"):
        del tried["torch.compile"]  # which writes C++, also for the kernels of a GPU
    variants = {name: Run(LAST, words, changes).train for name, changes in tried.items()}
    variants["2 threads"] = Run(LAST, words, threads=2).train
    if RANKS:
        runs |= {"copies of 01": limit.train, "copies that sum": Run("01", words, TALK).train}
        runs |= {step: Run(step, words).train for step in ("02", "03", "04")}
        pairs += [(step, "copies of 01") for step in ("copies that sum", "02", "03", "04", LAST)]
        pairs += [(step, "copies that sum") for step in ("02", "03", "04", LAST)]
        runs |= {"evaluation": own.evaluate, "copies' evaluation": limit.evaluate}
        pairs += [("evaluation", "copies' evaluation")]
        if hasattr(os, "sched_getaffinity"):  # Linux
            core = sorted(os.sched_getaffinity(0))[dist.get_rank() % os.cpu_count()]
            variants["each rank on a core of its own"] = Run(LAST, words, core=core).train
    else:
        runs["bare loop"] = limit.train_bare
        pairs += [(LAST, "bare loop")]
    return runs | variants, pairs + [(name, LAST) for name in variants]


# ---------------------------------------------------------------- showing


def table(ratios):
    """Return the ratios of each pair as rows, and these as a Markdown table."""
    rows, lines = [], ["| | against | ratio of speeds |", "|---|---|---|"]
    for (name, other), found in ratios.items():
        sign = -1 if name == "a save" else 1  # seconds and not speeds: its share of an epoch
        rows.append({"name": name, "against": other, **middle([ratio**sign for ratio in found])})
        form = "| {name} | {against} | {median:.3f} ({low:.3f}-{high:.3f}) |"
        lines.append(form.format(**rows[-1]))
    return rows, "\n".join(lines)


def parse_args():
    style = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **style)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--width", type=int, default=32, help="of the model; 256 for GPUs")
    parser.add_argument("--rounds", type=int, default=30, help="of all pairs")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if value < 1:
            parser.error(f"{name} must be positive, not {value}")
    return args


def measure(args):
    """Time all pairs in turn; return {name: [samples/s]} and {pair: [ratio of each round]}."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--batch-size={args.batch_size}", f"--width={args.width}"]
        runs, pairs = plan([*words, f"--checkpoint-path={folder}/checkpoint.pt"])
        for function in runs.values():
            speed(function)  # a warm-up
        found, ratios = {name: [] for name in runs}, {pair: [] for pair in pairs}
        shuffle = random.Random(0).shuffle  # all ranks have to shuffle alike
        for _ in tqdm(range(args.rounds), disable=RANKS > 0 and dist.get_rank() > 0):
            shuffle(pairs)
            for pair in pairs:
                both = list(pair)
                shuffle(both)
                for name in both:
                    found[name].append(speed(runs[name]))
                ratios[pair].append(found[pair[0]][-1] / found[pair[1]][-1])
    return found, ratios


def main():
    args = parse_args()
    if RANKS:
        load("04").ddp_setup(int(os.environ["LOCAL_RANK"]))
    found, ratios = measure(args)
    if not RANKS or dist.get_rank() == 0:
        rows, text = table(ratios)
        print(text)
        record = {"machine": machine(), "options": vars(args), "processes": RANKS or 1}
        record |= {"ratios": rows, "samples_per_second": found}
        path = Path(f"lines-{RANKS or 1}-of-{args.batch_size}.json")
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    sys.stdout.flush()
    if RANKS:
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
