"""Recipes that change the data and how it reaches the ranks."""

import json
import re
from textwrap import indent

import pytest
from changes import IMPATIENT, RESTARTS
from patching import page
from running import TWO
from support.jobs import finished
from support.positions import BATCH
from support.results import printed_by
from support.scripts import digest, forked, on_each_rank

pytestmark = pytest.mark.slow
# The first pixel of each training image encodes its index, and each rank prints its batches.
TRAINING_SET = "    return TensorDataset(shifted, labels[train].repeat(9)), "
INDEXED = (
    TRAINING_SET,
    f"    shifted[:, 0, 0, 0] = torch.arange(len(shifted)) / len(shifted)\n{TRAINING_SET}",
)
INDICES = "(source[:, 0, 0, 0] * 12942).round().int().tolist()"
SEEN = on_each_rank(f"[self.epochs_run, {INDICES}, {digest('self.model.parameters()')}]")
SHOWN = f"            {SEEN}{BATCH}"


def seen(job, rank, epoch):
    """Return the batches of a rank in an epoch, each with a checksum of the weights before it."""
    return [batch for number, *batch in map(json.loads, printed_by(job, rank)) if number == epoch]


def dealt(job, epoch):
    """Return the indices of the samples that both ranks have seen in an epoch."""
    batches = seen(job, 0, epoch) + seen(job, 1, epoch)
    return [index for batch, _ in batches for index in batch]


def workers(number):
    """Return the change to the number of DataLoader workers."""
    return [("num_workers=args.num_workers", f"num_workers={number}")]


@pytest.mark.gpu
def test_loader_workers(recipe):
    """Forked workers, spawned ones after a stop mid-epoch, or no workers: the noise is the same."""
    spawned = f'multiprocessing_context=["fork", "spawn"][{RESTARTS}]'
    first = workers(f"2 - {RESTARTS}, persistent_workers=True, {spawned}")
    recipe.with_and_without_a_stop(others=(first, workers(0)))


@pytest.mark.gpu
def test_streaming(recipe):
    """One run has one worker; the other stops with two and resumes with three: the same bits."""
    line = "    stream = Stream(data, "
    odd = (line, f"    data = torch.utils.data.Subset(data, range(12_941))\n{line}")
    others = workers(f"2 + {RESTARTS}"), workers(1)
    changes = INDEXED, odd, (BATCH, SHOWN)
    _, job = recipe.with_and_without_a_stop(*changes, args=TWO, others=others)
    first, second = (dealt(job, epoch) for epoch in (0, 1))
    assert len(first) == len(set(first)) == len(set(second)) == 12_940
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
    changes = INDEXED, (line, odd + line), (f"    {BATCH}", indent(SHOWN, "    "))
    job = recipe.ran(*changes, IMPATIENT, args=TWO)
    for epoch in (0, 1):
        mine, others = (seen(job, rank, epoch) for rank in (0, 1))
        assert [len(mine), len(others)] == [102, 101]
        assert [weights for _, weights in mine[:101]] == [weights for _, weights in others]
        assert sorted(dealt(job, epoch)) == list(range(12_929))


UNTIL_ONE_HAS_NONE = f"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
CODE
{on_each_rank("[*while_all_have_one(range(3 + 2 * dist.get_rank()))]")}
dist.destroy_process_group()
"""


def test_uneven_inputs_until_one_rank_has_none(tmp_path):
    """Of three batches and five, both ranks take three."""
    [code] = re.findall("^```python\n(.*?)^```$", page("more/recipes/uneven_inputs"), re.M | re.S)
    (tmp_path / "program.py").write_text(UNTIL_ONE_HAS_NONE.replace("CODE", code), encoding="utf-8")
    job = finished(forked(tmp_path / "program.py"), tmp_path)
    assert printed_by(job, 0) == printed_by(job, 1) == ["[0, 1, 2]"]
