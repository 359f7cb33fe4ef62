"""The figures compute what PyTorch and the scripts do, and are played by keyboard."""

import json
import random
from itertools import product

import pytest
from browser import NEEDS_BROWSER, check_figure
from playwright.sync_api import expect
from support import server
from support.jobs import finished
from support.scripts import ROOT, SCRIPT, load
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

FIGURES = ROOT / "diffs" / "figures"
PLACES = {  # the step at which each stands
    "one-step": "01-to-02",
    "where-the-time-goes": "01-to-02",
    "who-gets-which": "01-to-02",
    "life-of-a-job": "03-to-04",
    "who-resumes": "03-to-04",
    "who-is-counted": "04-to-05",
}

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def script(browser):
    """The figures' scripts, on an empty page."""
    page = browser.new_page()
    for path in (ROOT / "diffs" / "generator" / "figures.js", *FIGURES.glob("*.js")):
        page.add_script_tag(path=path)
    return page


# ---------------------------------------------------------------- one step

STEPS = 3
SWITCHES = ("sameData", "module", "noSync", "accumulate", "edit")
EVERY = [
    dict(zip(SWITCHES, values))
    for values in product([False, True], [False, True], [False, True], [1, 2, 4], [-1, 1])
]
DDP = '''"""Trains the figure's model with every combination of switches, on real ranks."""

import itertools
import json
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_default_dtype(torch.float64)
given = json.load(open(sys.argv[1]))
samples = torch.tensor(given["SAMPLES"], dtype=torch.float64)
dataset = TensorDataset(samples[:, :2], samples[:, 2:])
dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1


def run(sets):
    """Return the weights of all ranks after each step, and the number of all-reduces."""
    plain, reduces = nn.Linear(2, 1, bias=False), []
    if rank == 0:
        plain.weight.data = torch.tensor([given["FIRST"]], dtype=torch.float64)
    model = DistributedDataParallel(plain)

    def counted(group, bucket):
        reduces.append(bucket.index())
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=given["RATE"])
    sampler = None if sets["sameData"] else DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, given["BATCH"], sampler=sampler)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    forward = plain if sets["module"] else model
    after = []
    for step in range(given["steps"]):
        if step == sets["edit"] and rank == last:
            plain.weight.data[0, 0] += 0.5
        optimizer.zero_grad()
        for number in range(1, sets["accumulate"] + 1):
            waits = sets["noSync"] and number < sets["accumulate"]
            source, targets = next(batches)
            with model.no_sync() if waits else nullcontext():
                loss = nn.functional.mse_loss(forward(source), targets) / sets["accumulate"]
                loss.backward()
        optimizer.step()
        after.append([None] * (last + 1))
        dist.all_gather_object(after[-1], plain.weight[0].tolist())
    return {"after": after, "reduces": len(reduces)}


found = [run(sets) for sets in given["every"]]
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
'''
TRAIN = """([every, ranks, steps]) => every.map(sets =>
  [...Array(steps).keys()].map(done => figures["one-step"].train({ ...sets, ranks }, done + 1)))"""


def test_one_step_is_that_of_ddp(script, tmp_path):
    names = ("SAMPLES", "FIRST", "RATE", "BATCH")
    given = script.evaluate("names => names.map(name => figures['one-step'][name])", names)
    given = dict(zip(names, given)) | {"every": EVERY, "steps": STEPS}
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "train.py").write_text(DDP)
    result = finished(server.command("train.py", "given.json", nprocs=3), tmp_path)
    drawn = script.evaluate(TRAIN, [EVERY, 3, STEPS])
    for sets, wanted, states in zip(EVERY, json.loads(result.stdout), drawn, strict=True):
        for after, state in zip(wanted["after"], states, strict=True):
            for own, weights in zip(after, state["weights"], strict=True):
                assert weights == pytest.approx(own, rel=1e-12, abs=1e-12), sets
        assert states[-1]["reduces"] == wanted["reduces"], sets


# ---------------------------------------------------------------- who gets which sample

SAMPLES, EPOCHS = 30, 5  # what the figure offers
DEAL = """([every, data]) => every.map(sets => figures["who-gets-which"].deal(sets, data))"""


def some_settings(draw):
    return {
        "samples": draw.randint(1, SAMPLES),
        "ranks": draw.randint(1, 8),
        "batch": draw.randint(1, 4),
        "shuffle": draw.random() < 0.8,
        "dropLast": draw.random() < 0.4,
        "setEpoch": draw.random() < 0.8,
        "epoch": draw.randrange(EPOCHS),
        "resume": draw.choice([0, 1, 2, 3, 5]),
    }


def order(samples, epoch):
    """Return the order in which one rank would get all samples, one character per index."""
    indices = DistributedSampler(range(samples), 1, 0)
    indices.set_epoch(epoch)
    return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[index] for index in indices)


def sampled(kind, sets, rank, samples_run=0):
    """Return the indices that a sampler deals to a rank in an epoch."""
    options = {"shuffle": sets["shuffle"], "drop_last": sets["dropLast"]}
    sampler = kind(range(sets["samples"]), sets["ranks"], rank, **options)
    if sets["setEpoch"]:
        sampler.set_epoch(sets["epoch"])
    sampler.samples_run = samples_run
    return list(sampler)


def dealt(sets, resumable):
    """Return what the figure should: {way: [indices of rank 0, of rank 1, …]}."""
    ranks = range(sets["ranks"])
    distributed = [sampled(DistributedSampler, sets, rank) for rank in ranks]
    batches = list(BatchSampler(distributed[0], sets["batch"], drop_last=False))
    done = sum(len(batch) for batch in batches[: sets["resume"]])
    return {
        "distributed": distributed,
        "resumable": [sampled(resumable, sets, rank, done * sets["ranks"]) for rank in ranks],
        "range": [list(range(rank, sets["samples"], sets["ranks"])) for rank in ranks],
        "done": done,
    }


def test_a_thousand_deals_are_those_of_the_samplers(script):
    data = json.loads((FIGURES / "who-gets-which.json").read_text(encoding="utf-8"))
    assert data["epochs"] == EPOCHS
    assert data["orders"] == [
        [order(samples, epoch) for epoch in range(EPOCHS)] for samples in range(1, SAMPLES + 1)
    ]
    draw, resumable = random.Random(0), load("04").ResumableSampler
    every = [some_settings(draw) for _ in range(1000)]
    for sets, found in zip(every, script.evaluate(DEAL, [every, data]), strict=True):
        assert found == dealt(sets, resumable), sets


# ---------------------------------------------------------------- the life of a job

BATCHES = 51
TOTAL = 6 * BATCHES
OUTCOMES = """every => every.map(one => figures["life-of-a-job"].outcome(...one))"""


def expected(listens, save_every, at):
    """Return how many batches a run has trained when it stops, and how many the next one keeps."""
    if not listens:
        return at, max(n for n in range(0, TOTAL, save_every * BATCHES) if n <= at)
    questions = [n for n in range(TOTAL) if n % BATCHES % 10 == 0]
    stopped = min((n for n in questions if n > at), default=TOTAL)
    return stopped, stopped


def test_what_an_interruption_costs_is_what_the_scripts_do(script):
    """An epoch has 12,942 samples, two ranks take 128 each; a crash keeps the saved epochs."""
    assert BATCHES == -(-12_942 // (2 * 128))
    for step, path in SCRIPT.items():
        asks = "if step % 10 == 0 and self._stop_agreed():" in path.read_text(encoding="utf-8")
        assert asks == (step in ("04", "05"))
    every = list(product([False, True], [1, 2, 3], [*range(1, TOTAL, 7), TOTAL - 1]))
    for settings, found in zip(every, script.evaluate(OUTCOMES, every), strict=True):
        stopped, kept = expected(*settings)
        wanted = {"stopped": stopped, "from": kept, "lost": stopped - kept}
        assert found == wanted | {"finished": stopped == TOTAL}, settings


# ---------------------------------------------------------------- where the time goes

FORECASTS = """([every, record]) => every.map(settings =>
  figures["where-the-time-goes"].forecasted(record, settings))"""
ERRORS = """data => Object.values(data.records).map(figures["where-the-time-goes"].errors)"""


def test_a_step_is_redrawn_as_calculated_by_hand(script):
    """Both ranks compute for 10 ms, twice as long with twice the batch; an all-reduce takes 4."""
    rank = {"data": [[0, 1]], "forward": [[1, 4]], "backward": [[4, 10]], "waiting": [[10, 11]]}
    rank |= {"optimizer": [[11, 13]], "ready": [[6, 6], [10, 10]], "all-reduce": [[6, 8], [10, 11]]}
    record = {"ranks": [rank, rank], "bucket_bytes": [750, 250]}
    same = {"slower": 1, "batch": 1, "passes": 1, "no_sync": True}
    wanted = [
        ({"slower": 2}, [[6, 12], [12, 14]]),
        ({"batch": 2}, [[12, 15], [20, 21]]),
        ({"passes": 2}, [[16, 19], [20, 21]]),
        ({"passes": 2, "no_sync": False}, [[6, 9], [10, 11], [17, 20], [21, 22]]),
    ]
    every = [same | settings for settings, _ in wanted]
    for (_, sums), steps in zip(wanted, script.evaluate(FORECASTS, [every, record])):
        for step in steps:
            assert step["all-reduce"] == sums
            assert step["optimizer"] == [[sums[-1][1], sums[-1][1] + 2]]


def test_the_forecast_is_as_close_to_what_was_measured_as_the_page_says(script):
    data = json.loads((FIGURES / "where-the-time-goes.json").read_text(encoding="utf-8"))
    for measured in script.evaluate(ERRORS, data):
        assert len(measured) == 3
        assert all(abs(row["error"]) < 0.34 for row in measured)


# ---------------------------------------------------------------- played


@pytest.mark.slow
def test_each_is_played_by_keyboard_and_reset(visit):
    page = visit("#01-to-02")
    step, time, deal = (
        page.locator(f"#fig-{name}") for name, place in PLACES.items() if place == "01-to-02"
    )
    for name in ("Forward", "Backward", "All-reduce", "Step"):
        button = step.get_by_role("button", name=name, exact=True)
        expect(button).to_be_enabled()
        button.press("Enter")
    expect(step.locator(".counts")).to_have_text(
        "Steps: 1. All-reduces: 1. Weights: equal on all ranks."
    )
    step.get_by_label("Forward through .module").press("Space")
    step.get_by_role("button", name="Run the whole step").press("Enter")
    expect(step.get_by_role("status")).to_contain_text("There are now 3 different models")
    step.get_by_role("button", name="Reset").press("Enter")
    expect(step.locator(".counts")).to_contain_text("Steps: 0")

    time.get_by_role("slider", name="Network").press("End")
    expect(time.get_by_role("slider", name="Network")).to_have_attribute(
        "aria-valuetext", "10 times slower"
    )
    expect(time.locator(".said")).to_contain_text("Forecast: the step takes")
    time.get_by_role("button", name="Reset").press("Enter")
    expect(time.locator(".said")).to_contain_text("Recorded: the step took")

    deal.get_by_role("button", name="Next epoch").press("Enter")
    expect(deal.locator("tr").filter(has_text="epoch 1")).to_have_class("now")
    deal.get_by_label("set_epoch").press("Space")
    expect(deal.get_by_role("status")).to_contain_text("every epoch has the order of epoch 0")

    page = visit("#03-to-04")
    life = page.locator("#fig-life-of-a-job")
    jobs = life.locator(".jobs p")
    expect(jobs.first).to_contain_text("23 batches lost")  # saved after every epoch
    life.get_by_role("combobox", name="Save").press("ArrowDown")
    expect(jobs.first).to_contain_text("74 batches lost")  # the longer the interval, the more
    expect(jobs.last).to_contain_text("stopped and saved 7 batches later")
    life.get_by_role("slider").press("ArrowLeft")
    expect(jobs.last).to_contain_text("saved 8 batches later")
    resumes = page.locator("#fig-who-resumes")
    assert resumes.locator(".way").nth(1).locator(".done").count() == 6  # two by each of three
    counted = visit("#04-to-05").locator("#fig-who-is-counted")
    expect(counted.locator(".verdict").first).to_contain_text("counts 12 samples instead of 10")


@pytest.mark.slow
def test_each_is_accessible_in_the_dark_on_a_phone(visit):
    """And on a laptop as the page is opened: test_page.py checks that."""
    for name, place in PLACES.items():
        page = visit(f"#{place}", "phone", color_scheme="dark")
        if name == "one-step":
            page.get_by_role("button", name="Run the whole step").click()
        for fold in page.locator(f"#fig-{name} summary").all():
            fold.click()
        check_figure(page, f"#fig-{name}")
