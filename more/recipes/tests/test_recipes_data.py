"""Recipes that change the data and how it reaches the ranks."""

import json
import re
from textwrap import indent

import pytest
from changes import IMPATIENT, LENGTH, RESTARTS
from patching import page
from running import TWO
from support import gpus
from support.jobs import finished
from support.positions import BATCH
from support.results import said
from support.scripts import forked

pytestmark = pytest.mark.slow
# The first pixel of each training image encodes its index, and each rank records its batches.
TRAINING_SET = "    return TensorDataset(shifted, labels[train].repeat(9)), "
INDEXED = (
    TRAINING_SET,
    f"    shifted[:, 0, 0, 0] = torch.arange(len(shifted)) / len(shifted)\n{TRAINING_SET}",
)
SEEN = """\
            with open(f"seen{dist.get_rank()}", "a") as file:
                indices = (source[:, 0, 0, 0] * 12942).round().int().tolist()
                weights = sum(part.double().sum().item() for part in self.model.parameters())
                print([self.epochs_run, indices, weights], file=file)
"""


def seen(job, rank, epoch):
    """Return the batches of a rank in an epoch, each with the sum of the weights before it."""
    lines = (job.cwd / f"seen{rank}").read_text(encoding="utf-8").splitlines()
    return [batch for number, *batch in map(json.loads, lines) if number == epoch]


def dealt(job, *ranks, epoch):
    """Return the indices of the samples that these ranks have seen in an epoch."""
    return [index for rank in ranks for batch, _ in seen(job, rank, epoch) for index in batch]


@pytest.mark.gpu
def test_loader_workers(recipe):
    """Forked workers, spawned ones after a stop mid-epoch, or no workers: the noise is the same."""
    spawned = f'multiprocessing_context=["fork", "spawn"][{RESTARTS}]'
    count = f"num_workers=2 - {RESTARTS}, persistent_workers=True, {spawned}"
    others = (
        [("num_workers=args.num_workers", count), LENGTH],
        [("num_workers=args.num_workers", "num_workers=0")],
    )
    recipe.with_and_without_a_stop(others=others)


@pytest.mark.gpu
def test_streaming(recipe):
    """One run has one worker; the other stops with two and resumes with three: the same batches."""
    line = "    stream = Stream(data, "
    odd = (line, f"    data = torch.utils.data.Subset(data, range(12_941))\n{line}")
    counts = [
        [("num_workers=args.num_workers", f"num_workers={count}")]
        for count in (f"2 + {RESTARTS}", 1)
    ]
    changes = INDEXED, odd, (BATCH, SEEN + BATCH)
    jobs = recipe.with_and_without_a_stop(*changes, args=TWO, others=counts)
    for name in "seen0", "seen1":
        one, other = ((job.cwd / name).read_text(encoding="utf-8") for job in jobs)
        assert one == other
    assert [len(batch) for batch, _ in seen(jobs[0], 1, 0)] == [64] * 101 + [6]
    first, second = (dealt(jobs[0], 0, 1, epoch=epoch) for epoch in (0, 1))
    assert len(set(first)) == len(set(second)) == 12_940
    assert first != second
    assert first != sorted(first)


def test_prepare_once(recipe):
    """Each rank plays a node: rank 0 fills a shared folder beyond the timeout, or each its disk."""
    save, main = "        torch.save((scans, labels)", "@record"
    wait = '        print("prepares", flush=True)\n        time.sleep(8 * (1 - dist.get_rank()))\n'
    node = 'os.environ["LOCAL_RANK"] = "0"\n'
    disk = 'os.mkdir(own := os.environ["RANK"])\nos.chdir(own)\n'
    changes = IMPATIENT, (save, wait + save)
    assert recipe.ran(*changes, (main, f"{node}\n\n{main}")).stdout.count("prepares") == 1
    (own,) = re.findall(r"check\s`(.*)` instead", page("more/recipes/prepare_once"))
    per_node = ("dist.get_rank() == 0 and not os.path", f"{own} and not os.path")
    recipe.at("disks").ran(per_node, (main, f"{node}{disk}\n\n{main}"))
    assert len(list(recipe.folder.glob("disks/[01]/digits.pt"))) == 2
    recipe.at("impatient").refused(*changes, ("dist.barrier(patient)", "dist.barrier()"))


@pytest.mark.gpu
def test_uneven_inputs(recipe):
    """Rank 0 gets an extra batch with one sample; in the other steps, the weights are the same."""
    line = "    sampler = UnevenSampler("
    odd = "    data.tensors = [part[:12_929] for part in data.tensors]\n"
    changes = INDEXED, (line, odd + line), (f"    {BATCH}", indent(SEEN + BATCH, "    "))
    job = recipe.ran(*changes, args=TWO)
    for epoch in (0, 1):
        mine, others = (seen(job, rank, epoch) for rank in (0, 1))
        assert [len(mine), len(others)] == [102, 101]
        assert [total for _, total in mine[:101]] == [total for _, total in others]
        assert sorted(dealt(job, 0, 1, epoch=epoch)) == list(range(12_929))
    alone = ("with self.model.join():", "if True:"), ("dist.broadcast(tensor, 0)", "pass")
    broken = recipe.at("alone").ran(*changes, IMPATIENT, *alone, args=TWO, code=1)
    said = ["Watchdog caught"] if gpus.count() else ["op.preamble.length <= op.nbytes"]
    assert all(text in broken.stderr for text in said), broken


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(2, 1))
CODE
for step, batch in enumerate(while_all_have_one(torch.ones(3 + 2 * dist.get_rank(), 1, 2))):
    model(batch).sum().backward()
print(f"rank {dist.get_rank()}: {step + 1}\\n", end="")
dist.destroy_process_group()
"""


def test_uneven_inputs_under_fsdp2(tmp_path):
    """Of three batches and five, both ranks take three."""
    [code] = re.findall("^```python\n(.*?)^```$", page("more/recipes/uneven_inputs"), re.M | re.S)
    (tmp_path / "program.py").write_text(SHARDED.replace("CODE", code), encoding="utf-8")
    job = finished(forked(tmp_path / "program.py"), tmp_path)
    assert said(job, 0) == said(job, 1) == ["3"]
