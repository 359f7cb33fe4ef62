"""The figure of one step computes what DDP computes, whatever is switched on."""

import json
import re
from itertools import product

import pytest
from playwright.sync_api import expect
from support import server
from browser import NEEDS_BROWSER, check_figure
from support.jobs import finished
from support.scripts import ROOT

FIGURE = "#fig-one-step"
STEPS = 3
SWITCHES = ("sameData", "module", "noSync", "accumulate", "edit")
EVERY = [
    dict(zip(SWITCHES, values))
    for values in product([False, True], [False, True], [False, True], [1, 2, 4], [-1, 1])
]
DDP = '''"""Trains the figure's model with every combination of switches, on real ranks."""

import itertools
import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta

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
dist.init_process_group("gloo", timeout=timedelta(minutes=1))
rank, last = dist.get_rank(), dist.get_world_size() - 1


def build(group=None):
    """Return the wrapped model, with the weights of rank 0, and the list of its all-reduces."""
    model = nn.Linear(2, 1, bias=False)
    if rank == 0:
        model.weight.data = torch.tensor([given["FIRST"]], dtype=torch.float64)
    wrapped, reduces = DistributedDataParallel(model, process_group=group), []

    def counted(group, bucket):
        reduces.append(bucket.index())
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(group, counted)
    return wrapped, reduces


def run(sets, steps):
    """Return the weights of all ranks after each step, and the number of all-reduces."""
    model, reduces = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=given["RATE"])
    sampler = None if sets["sameData"] else DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, given["BATCH"], sampler=sampler)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    forward = model.module if sets["module"] else model
    after = []
    for step in range(steps):
        if step == sets["edit"] and rank == last:
            model.module.weight.data[0, 0] += 0.5
        optimizer.zero_grad()
        for number in range(1, sets["accumulate"] + 1):
            waits = sets["noSync"] and number < sets["accumulate"]
            source, targets = next(batches)
            with model.no_sync() if waits else nullcontext():
                loss = nn.functional.mse_loss(forward(source), targets) / sets["accumulate"]
                loss.backward()
        optimizer.step()
        after.append([None] * (last + 1))
        dist.all_gather_object(after[-1], model.module.weight[0].tolist())
    return {"after": after, "reduces": len(reduces)}


def wait():
    """Let the last rank stay away from the all-reduce: return what becomes of each rank."""
    model, _ = build(dist.new_group(timeout=timedelta(seconds=1)))
    error = ""
    if rank != last:
        try:
            model(dataset[:2][0]).sum().backward()
        except RuntimeError as raised:
            error = str(raised)
    found = [None] * (last + 1)
    dist.all_gather_object(found, [error, model.module.weight[0].tolist()])
    return found


found = {"trained": [run(sets, given["steps"]) for sets in given["every"]]}
found["waited"] = wait()
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # the group that timed out cannot be destroyed
'''
TRAIN = """([every, ranks, steps]) => every.map(sets =>
  [...Array(steps).keys()].map(done => figures["one-step"].train({ ...sets, ranks }, done + 1)))"""

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def script(browser):
    """The figure's script, on an empty page."""
    page = browser.new_page()
    page.add_script_tag(path=ROOT / "diffs" / "generator" / "figures.js")
    page.add_script_tag(path=ROOT / "diffs" / "figures" / "one-step.js")
    return page


@pytest.mark.parametrize(
    "ranks",
    [3, *(pytest.param(ranks, marks=pytest.mark.weekly) for ranks in (2, 4))],
)
def test_it_computes_what_ddp_computes(script, tmp_path, ranks):
    names = ("SAMPLES", "FIRST", "RATE", "BATCH")
    given = script.evaluate("names => names.map(name => figures['one-step'][name])", names)
    given = dict(zip(names, given)) | {"every": EVERY, "steps": STEPS}
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "train.py").write_text(DDP)
    result = finished(server.command("train.py", "given.json", nprocs=ranks), tmp_path)
    assert result.returncode == 0, result
    real = json.loads(result.stdout)
    drawn = script.evaluate(TRAIN, [EVERY, ranks, STEPS])
    for sets, wanted, states in zip(EVERY, real["trained"], drawn, strict=True):
        for after, state in zip(wanted["after"], states, strict=True):
            for own, weights in zip(after, state["weights"], strict=True):
                assert weights == pytest.approx(own, rel=1e-12, abs=1e-12), sets
        assert states[-1]["reduces"] == wanted["reduces"], sets
    *others, absent = real["waited"]
    assert any("Timed out waiting 1000ms" in error for error, _ in others), others
    assert all(error for error, _ in others)  # some lose their connection to one that timed out
    assert absent == ["", given["FIRST"]]
    assert all(weights == given["FIRST"] for _, weights in others)


def weights(figure):
    """Return the weights that are shown, by rank."""
    return figure.locator("tbody tr").last.locator("td").all_inner_texts()


def test_four_buttons_make_a_step(visit):
    figure = visit(FIGURE).locator(FIGURE)
    said = figure.get_by_role("status")
    expect(said).to_contain_text("DDP(model) has sent them from rank 0")
    figure.get_by_role("button", name="Forward", exact=True).focus()
    for text in ("a loss of its own", "own way", "given every rank the mean", "equal again"):
        figure.page.keyboard.press("Enter")  # the focus moves to the button that comes next
        expect(said).to_contain_text(text)
    assert len(set(weights(figure))) == 1
    expect(figure.locator(".counts")).to_have_text(
        "Steps: 1. All-reduces: 1. Weights: equal on all ranks."
    )


def test_a_missing_rank_is_waited_for(visit):
    figure = visit(FIGURE).locator(FIGURE)
    whole = figure.get_by_role("button", name="Run the whole step")
    whole.click()
    undisturbed = weights(figure)
    figure.get_by_role("button", name="Reset").click()
    missing = figure.get_by_label("Rank 2 never arrives")
    missing.check()
    whole.click()
    said = figure.get_by_role("status")
    expect(said).to_contain_text("Ranks 0 and 1 wait in backward()")
    expect(whole).to_be_disabled()
    missing.uncheck()
    figure.get_by_role("button", name="All-reduce").click()
    figure.get_by_role("button", name="Step", exact=True).click()
    assert weights(figure) == undisturbed
    missing.check()
    whole.click()
    figure.get_by_role("button", name="Let the timeout pass").click()
    expect(said).to_contain_text("backward() raises an error on ranks 0 and 1")
    assert weights(figure) == undisturbed
    expect(missing).to_be_disabled()  # a job that has ended does not go on
    expect(whole).to_be_disabled()
    figure.page.keyboard.press("Enter")  # the focus is on the only way on
    expect(said).to_contain_text("The job runs again, with rank 2 on a healthy node")
    expect(missing).not_to_be_checked()
    whole.click()
    expect(figure.locator(".counts")).to_contain_text("Steps: 2. All-reduces: 2. Weights: equal")


def test_a_switch_says_what_it_breaks(visit):
    figure = visit(FIGURE).locator(FIGURE)
    reset = figure.get_by_role("button", name="Reset")
    whole = figure.get_by_role("button", name="Run the whole step")
    said, counts = figure.get_by_role("status"), figure.locator(".counts")
    for label, text, counted in (
        ("No sampler", "learned from the same 2 samples", "1. Weights: equal"),
        ("Forward through .module", "There are now 3 different models", "0. Weights: different"),
    ):
        switch = figure.get_by_label(label)
        switch.check()
        whole.click()
        expect(said).to_contain_text(text)
        expect(counts).to_contain_text(f"All-reduces: {counted}")
        switch.uncheck()
        expect(said).to_contain_text("Nothing is broken now")
        apart = figure.get_by_text("apart, and DDP never compares them")
        expect(apart).to_have_count(int("different" in counted))
        switch.check()
        reset.click()
        expect(said).to_contain_text(f"Still switched on: {label.lower()}. Press Forward.")
        switch.uncheck()
    figure.get_by_role("button", name="Add 0.5").click()
    for _ in range(3):
        whole.click()
    expect(said).to_contain_text("the ranks stay 0.50 apart")
    reset.click()
    figure.get_by_label("Batches per step").select_option("4")
    whole.click()
    expect(said).to_contain_text("4 all-reduces for one step")
    without = weights(figure)
    reset.click()
    figure.get_by_label("no_sync").check()
    whole.click()
    expect(said).to_contain_text("One all-reduce for 4 batches")
    assert weights(figure) == without


def test_the_map_keeps_every_rank_in_sight(visit):
    figure = visit(FIGURE).locator(FIGURE)
    whole, more = (figure.get_by_role("button", name=name) for name in ("Run the", "Add 0.5"))
    sight, scale = figure.get_by_role("img"), figure.locator("svg .scale")
    whole.click()
    expect(scale).to_be_empty()
    head = figure.locator("svg .arrow-shared[stroke-width]").first.bounding_box()
    name = figure.locator("svg .name").bounding_box()
    sides = (("x", "width"), ("y", "height"))
    overlap = [
        min(one[side] + one[size] for one in (head, name)) - max(head[side], name[side])
        for side, size in sides
    ]
    assert min(overlap) <= 0, (head, name)
    for _ in range(4):
        whole.click()
    expect(scale).to_have_text("zoom 4")
    for _ in range(20):
        more.click()
    expect(scale).to_contain_text("zoom 1/")
    expect(sight).to_have_attribute("aria-label", re.compile(r"map, zoom 1/\d+\. Ranks 0 and 1 at"))
    centres = "all => all.map(e => [e.cx.baseVal.value, e.cy.baseVal.value])"
    dots = figure.locator("svg .dot").evaluate_all(centres)
    assert len(dots) == 2
    assert all(0 < number < 340 for dot in dots for number in dot)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "size"),
    [("dark", "phone"), pytest.param("light", "laptop", marks=pytest.mark.weekly)],
)
def test_it_is_accessible(visit, scheme, size):
    page = visit(FIGURE, size, color_scheme=scheme)
    figure = page.locator(FIGURE)
    whole = figure.get_by_role("button", name="Run the whole step")
    figure.get_by_role("button", name="Add 0.5").click()
    whole.click()
    check_figure(page, FIGURE)
    figure.get_by_label("never arrives").check()
    whole.click()
    check_figure(page, FIGURE)
