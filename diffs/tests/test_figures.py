"""The figures compute what PyTorch and the scripts do, and are played by keyboard."""

import json
from ast import literal_eval
from itertools import product

import pytest
import torch
from browser import NEEDS_BROWSER
from playwright.sync_api import expect
from support import server
from support.jobs import finished
from support.scripts import ROOT
from torch.testing import assert_close
from torch.utils.data.distributed import DistributedSampler

FIGURES = ROOT / "diffs" / "figures"
pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def script(browser):
    """The figures' scripts, on an empty page."""
    page = browser.new_page()
    for path in (ROOT / "diffs" / "generator" / "figures.js", *FIGURES.glob("*.js")):
        page.add_script_tag(path=path)
    return page


def combinations(**choices):
    return [dict(zip(choices, values)) for values in product(*choices.values())]


# ---------------------------------------------------------------- one step

STEPS = 3
SWITCHES = combinations(sameData=[False, True], module=[False, True])
DDP = '''
from itertools import cycle

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

torch.set_default_dtype(torch.float64)
samples = torch.tensor(given["SAMPLES"])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


def run(switches):
    """Return the weights of all ranks after each step."""
    plain, weights = nn.Linear(2, 1, bias=False), []
    plain.weight.data = torch.tensor([given["FIRST"]]).double() + rank  # DDP makes them rank 0's
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=given["RATE"])
    order = [*DistributedSampler(samples, shuffle=False)]
    if switches["sameData"]:
        stride, count = given["SHUFFLES"][rank], len(samples)
        order = [(at + 3 * rank) * stride % count for at in range(count)]
    batches = cycle(samples[order].split(given["BATCH"]))
    forward = plain if switches["module"] else model
    for _ in range(given["steps"]):
        optimizer.zero_grad()
        source, targets = next(batches).split([2, 1], dim=1)
        nn.functional.mse_loss(forward(source), targets).backward()
        optimizer.step()
        weights.append([None] * world_size)
        dist.all_gather_object(weights[-1], plain.weight[0].tolist())
    return weights


found = [run(switches) for switches in given["switches"]]
if rank == 0:
    print(found, flush=True)
dist.barrier()
dist.destroy_process_group()
'''
TRAIN = """([all, ranks, steps]) => all.map(switches => [...Array(steps).keys()].map(
  done => figures["one-step"].train({ ...switches, ranks }, done + 1).weights))"""


def test_one_step_is_that_of_ddp(script, tmp_path):
    names = ("SAMPLES", "SHUFFLES", "FIRST", "RATE", "BATCH")
    given = script.evaluate("names => names.map(name => figures['one-step'][name])", names)
    given = dict(zip(names, given)) | {"switches": SWITCHES, "steps": STEPS}
    (tmp_path / "train.py").write_text(f"given = {given}{DDP}")
    trained = literal_eval(finished(server.command("train.py", nprocs=3), tmp_path).stdout)
    drawn = script.evaluate(TRAIN, [SWITCHES, 3, STEPS])
    assert_close(*(torch.tensor(weights, dtype=torch.float64) for weights in (drawn, trained)))


# ---------------------------------------------------------------- who gets which sample

DEAL = """([all, data]) => all.map(settings => figures["who-gets-which"].deal(settings, data))"""


def sampled(settings, rank):
    """Return the indices that DistributedSampler deals to a rank in an epoch."""
    options = {"shuffle": settings["shuffle"], "drop_last": settings["dropLast"]}
    sampler = DistributedSampler(range(settings["samples"]), settings["ranks"], rank, **options)
    if settings["setEpoch"]:
        sampler.set_epoch(settings["epoch"])
    return list(sampler)


def test_all_deals_are_those_of_the_sampler(script):
    switches = {name: [False, True] for name in ("shuffle", "dropLast", "setEpoch")}
    all_settings = combinations(epoch=range(5), samples=range(1, 31), ranks=[3, 8], **switches)
    data = json.loads((FIGURES / "who-gets-which.json").read_text(encoding="utf-8"))
    deals = script.evaluate(DEAL, [all_settings, data])
    for settings, deal in zip(all_settings, deals, strict=True):
        ranks = range(settings["ranks"])
        assert deal["distributed"] == [sampled(settings, rank) for rank in ranks], settings
        shards = [list(range(rank, settings["samples"], len(ranks))) for rank in ranks]
        assert deal["range"] == shards


# ---------------------------------------------------------------- played


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
