"""What lookup/which.md says is computed, and close to what is counted."""

import importlib
import json
import re
import statistics
import sys
from itertools import accumulate

import pytest
import torch
from patching import page
from support.jobs import finished
from support.scripts import ROOT
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

LOOKUP = ROOT / "lookup"
SLOW = pytest.mark.slow
PARAMETERS = 117_479  # of the exercise's GPT
TOKENS = 32 * 64  # per rank and step: samples and characters
LAYOUTS = {  # of the recipes' four ranks: (nodes, GPUs per node)
    "zero_optimizer": (1, 4),
    "fsdp2_gpt": (1, 4),
    "hybrid_sharding": (2, 2),
    "tensor_parallel": (1, 4),
    "two_dimensional": (2, 2),
    "pipeline": (1, 4),
}


@pytest.fixture
def which(monkeypatch):
    monkeypatch.syspath_prepend(LOOKUP)
    return importlib.import_module("which")


@pytest.fixture
def collectives(monkeypatch):
    monkeypatch.syspath_prepend(LOOKUP)
    return importlib.import_module("collectives")


# ---------------------------------------------------------------- the page


def test_the_tables_are_computed(which):
    text = page("lookup/which")
    example = which.Job(3e9, *which.shape(3e9), 2, 4, 4096)
    assert which.table(which.HEADING, *which.rows(example, 40e9)) in text
    assert which.recommended(example, 40e9) == "hybrid_sharding"
    pattern = r"^\| ([\d.]+) billion \| (\d+) GB \| (\d+) \S (\d+) \| (yes|no) \|(.*)\|$"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) == 9
    for billions, limit, nodes, gpus, checkpointed, said in rows:
        parameters = 1e9 * float(billions)
        shape = parameters, *which.shape(parameters), int(nodes), int(gpus), 4096
        job = which.Job(*shape, checkpointed=checkpointed == "yes")
        way = which.recommended(job, 1e9 * int(limit))
        sizes = sum(which.memory(way, job)), job.gpus * which.sent(way, job)[1]
        shown = (which.WAYS[way], *(f"{size / 1e9:.1f} GB" for size in sizes))
        assert tuple(word.strip() for word in said.split("|")) == shown


@pytest.mark.parametrize("name", [n for n in LAYOUTS if (ROOT / f"recipes/{n}.md").exists()])
def test_the_formulae_are_close_to_what_the_recipe_counts(which, name):
    """The numbers on the page are those that its test counts. Rows do not divide evenly."""
    text = page(f"recipes/{name}")
    counted = int(re.search(r"\(([\d,]+) parameters\)", text)[1].replace(",", ""))
    layers = 2 if counted == PARAMETERS else 4
    job = which.Job(counted, layers, 64, *LAYOUTS[name], TOKENS, mixed=False)
    states, *_ = which.memory(name, job)
    cells = re.findall(r"^\| (?:parameters|optimizer) .* per rank .*\|(.*)\|$", text, re.MULTILINE)
    assert len(cells) == 2
    found = [[int(n.replace(",", "")) for n in re.findall(r"\d[\d,]+", cell)] for cell in cells]
    assert sum(map(statistics.mean, found)) == pytest.approx(states, rel=0.08)
    (row,) = re.findall(r"^\| sent per step and rank.*\|(.*)\|$", text, re.MULTILINE)
    found = int(re.search(r"[\d,]+", row)[0].replace(",", ""))
    assert 0.74 * found < sum(which.sent(name, job)) < 1.08 * found


# ---------------------------------------------------------------- the formulae


def test_the_loss_takes_12_bytes_per_token_and_word():
    tokens, words = 256, 5000
    source, weight = torch.rand(tokens, 8), torch.rand(words, 8, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    with profile(profile_memory=True) as recorded:
        nn.functional.cross_entropy(source @ weight.T, targets).backward()
    events = recorded.profiler.kineto_results.events()
    sizes = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    assert max(sizes) / tokens / words == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize(("mixed", "size"), [(False, 16 * 4), (True, 14 * 2 + 2 * 4)])
def test_a_block_keeps_16_values(collectives, mixed, size):
    """And the statistics of two norms, and a number per head. x lives until all is counted.

    Under autocast, the two that pass the block by stay in float32.
    """
    model, names = collectives.gpt()
    block, kept = model.blocks[0], {}
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        copied = mixed and tensor.shape[::-1] in shapes  # of a weight, in bf16
        if storage.data_ptr() not in parameters and not copied:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    shapes = {p.shape for p in block.parameters()}
    x = torch.zeros(2, names["context"], names["width"]).requires_grad_()
    cast = torch.autocast("cpu", torch.bfloat16, enabled=mixed)
    with cast, saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(x)
    assert result.requires_grad
    assert sum(kept.values()) / x[..., 0].numel() == pytest.approx(size * names["width"], rel=0.01)


# ---------------------------------------------------------------- collectives


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What collectives.py counts: {way: {ranks: [[of what, collective, bytes], ...]}}."""
    words = [sys.executable, LOOKUP / "collectives.py", "--json"]
    found = json.loads(finished(words, tmp_path_factory.mktemp("counted")).stdout)
    return {way: {int(n): calls for n, calls in by.items()} for way, by in found.items()}


@SLOW
def test_the_collectives_on_the_page_are_counted(which, collectives, counted):
    assert which.table(*collectives.rows(counted)) in page("benchmarks/README")


@SLOW
@pytest.mark.parametrize(
    ("way", "name", "most_ranks", "least", "most"),
    [
        ("DDP", "ddp", 4096, 1, 1),
        ("FSDP2", "fsdp2_gpt", 64, 0.97, 1),  # gathers the embeddings and the head once
        ("2-D", "two_dimensional", 512, 1, 1.15),  # which are not split here
    ],
)
def test_what_is_sent_is_what_the_formulae_say(
    collectives, counted, which, way, name, most_ranks, least, most
):
    for ranks, calls in counted[way].items():
        if ranks <= most_ranks:
            sent = sum(collectives.sent(calls, collectives.groups(way, ranks)).values())
            assert least <= round(sent / formula(which, name, ranks), 9) <= most


def formula(which, way, ranks):
    """Return what the formulae say that a rank sends for the GPT of collectives.py, in float32."""
    collectives = importlib.import_module("collectives")
    model, names = collectives.gpt()
    parameters = sum(p.numel() for p in model.parameters())
    shape = names["layers"], names["width"]
    job = which.Job(parameters, *shape, ranks // 8, 8, collectives.TOKENS // 8, mixed=False)
    return sum(which.sent(way, job))
