"""The figures compute what PyTorch does, and are played by keyboard."""

from ast import literal_eval
from itertools import product

import pytest
from browser import NEEDS_BROWSER
from playwright.sync_api import expect
from support import server
from support.jobs import finished
from support.results import printed_by
from support.scripts import on_each_rank
from torch.utils.data.distributed import DistributedSampler

pytestmark = NEEDS_BROWSER

EPOCH = """[false, true].map(module => figures["one-step"].train({ranks: 3, module}, 4).weights)"""
DDP = f"""
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
samples = torch.tensor(figure["SAMPLES"])
sampler = DistributedSampler(samples, shuffle=False)
for through_module in False, True:
    plain = nn.Linear(2, 1, bias=False)
    plain.weight.data = torch.tensor([figure["FIRST"]], dtype=torch.float64)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=figure["RATE"])
    for batch in DataLoader(samples, figure["BATCH"], sampler=sampler):
        optimizer.zero_grad()
        source, target = batch.split([2, 1], dim=1)
        output = (plain if through_module else model)(source)
        nn.functional.mse_loss(output, target).backward()
        optimizer.step()
    {on_each_rank("plain.weight[0].tolist()")}
dist.barrier()
del model
dist.destroy_process_group()
"""


def test_an_epoch_of_steps_is_that_of_ddp(visit, tmp_path):
    page = visit()
    figure = page.evaluate("figures['one-step']")
    (tmp_path / "train.py").write_text(f"figure = {figure}\n{DDP}")
    job = finished(server.command("train.py", nprocs=3), tmp_path)
    trained = [map(literal_eval, printed_by(job, rank)) for rank in range(3)]
    for drawn, weights in zip(page.evaluate(EPOCH), zip(*trained), strict=True):
        assert drawn == [pytest.approx(each) for each in weights]


DEAL = """every => {
    const data = JSON.parse(document.getElementById("who-gets-which-data").textContent);
    return every.map(sets => figures["who-gets-which"].deal(sets, data));
}"""


def test_all_deals_are_those_of_the_sampler(visit):
    choices = {"epoch": range(5), "samples": range(1, 31), "ranks": [3, 8]}
    choices |= dict.fromkeys(("shuffle", "dropLast", "setEpoch"), (False, True))
    every = [dict(zip(choices, values)) for values in product(*choices.values())]
    for sets, deal in zip(every, visit().evaluate(DEAL, every), strict=True):
        samples, ranks = sets["samples"], sets["ranks"]
        options = {"shuffle": sets["shuffle"], "drop_last": sets["dropLast"]}
        for rank, *dealt in zip(range(ranks), deal["distributed"], deal["range"], strict=True):
            sampler = DistributedSampler(range(samples), ranks, rank, **options)
            sampler.set_epoch(sets["epoch"] if sets["setEpoch"] else 0)
            assert dealt == [list(sampler), list(range(rank, samples, ranks))], sets


@pytest.mark.slow
def test_each_is_played_by_keyboard_and_reset(visit):
    page = visit("#01-to-02")
    step, time, deal = page.locator(".play:visible").all()
    for name in ("Forward", "Backward", "All-reduce", "Step"):
        step.get_by_role("button", name=name, exact=True).press("Enter")
    counts, text = step.locator(".counts"), step.get_by_role("status")
    expect(counts).to_have_text("Steps: 1. All-reduces: 1. Weights: equal on all ranks.")
    step.get_by_label("Forward through .module").press("Space")
    step.get_by_role("button", name="Run the whole step").press("Enter")
    expect(text).to_contain_text("There are now 3 different models")
    step.get_by_role("button", name="Reset").press("Enter")
    expect(counts).to_contain_text("Steps: 0. All-reduces: 0.")

    time.get_by_role("slider", name="Network").press("End")
    expect(time.locator(".said")).to_contain_text("Forecast: the step takes")
    time.get_by_role("button", name="Reset").press("Enter")
    expect(time.locator(".said")).to_contain_text("Recorded: the step took")

    deal.get_by_role("button", name="Next epoch").press("Enter")
    expect(deal.locator("tr").filter(has_text="epoch 1")).to_have_class("now")
    life = visit("#03-to-04").locator(".play:visible")
    crashed, _, signalled = life.locator(".jobs p").all()
    expect(crashed).to_contain_text("23 batches lost")  # saved after every epoch of 51 batches
    life.get_by_role("combobox", name="Save").press("ArrowDown")
    expect(crashed).to_contain_text("74 batches lost")  # the longer the interval, the more
    life.get_by_role("slider").press("ArrowLeft")
    expect(signalled).to_contain_text("saved 8 batches later")
    counted = visit("#04-to-05").locator(".play:visible")
    expect(counted.locator(".verdict").first).to_contain_text("counts 12 samples instead of 10")
