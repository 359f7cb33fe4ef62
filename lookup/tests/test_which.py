"""What lookup/which.md says is computed, and close to what is counted."""

import re
import statistics
import sys
from itertools import accumulate

import collectives
import pytest
import torch
import which
from patching import page
from support.jobs import finished
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

LAYOUTS = {  # of the recipes' four ranks: (nodes, GPUs per node)
    "zero_optimizer": (1, 4),
    "fsdp2_gpt": (1, 4),
    "hybrid_sharding": (2, 2),
    "tensor_parallel": (1, 4),
    "two_dimensional": (2, 2),
    "pipeline": (1, 4),
}


def test_the_tables_are_computed(tmp_path):
    text = page("lookup/which")
    (words,) = re.findall(r"^python lookup/which.py (.+)$", text, re.MULTILINE)
    printed = finished([sys.executable, which.__file__, *words.split()], tmp_path).stdout
    table, chosen = printed.split("\n\n")
    assert table in text
    assert chosen == "The simplest that fits: hybrid\n"
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_formulae_are_close_to_what_the_recipe_counts(name):
    """The numbers on the page are those that its test counts. Rows do not divide evenly."""
    text = page(f"recipes/{name}")
    counted = int(re.search(r"\(([\d,]+) parameters\)", text)[1].replace(",", ""))
    layers, tokens = 2 if counted == 117_479 else 4, 32 * 64  # of the exercise's GPT, or a copy
    job = which.Job(counted, layers, 64, *LAYOUTS[name], tokens, mixed=False)
    states, *_ = which.memory(name, job)
    cells = re.findall(r"^\| (?:parameters|optimizer) .* per rank .*\|(.*)\|$", text, re.MULTILINE)
    assert len(cells) == 2
    found = [[int(n.replace(",", "")) for n in re.findall(r"\d[\d,]+", cell)] for cell in cells]
    assert sum(map(statistics.mean, found)) == pytest.approx(states, rel=0.08)
    (row,) = re.findall(r"^\| sent per step and rank.*\|(.*)\|$", text, re.MULTILINE)
    found = int(re.search(r"[\d,]+", row)[0].replace(",", ""))
    assert 0.74 * found < sum(which.sent(name, job)) < 1.08 * found


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
def test_a_block_keeps_16_values(mixed, size):
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


BOUNDS = {  # {method: (recipe, up to how many ranks, least and most of what the formulae say)}
    "DDP": ("ddp", 4096, 1, 1),
    "FSDP2": ("fsdp2_gpt", 64, 0.97, 1),  # gathers the embeddings and the head once
    "2-D": ("two_dimensional", 512, 1, 1.15),  # which are not split here
}


@pytest.mark.slow
def test_what_is_sent_is_on_the_page_and_is_what_the_formulae_say(tmp_path):
    """For the GPT of collectives.py, in float32."""
    table = finished([sys.executable, collectives.__file__], tmp_path).stdout
    assert table in page("benchmarks/README")
    model, names = collectives.gpt()
    size = sum(p.numel() for p in model.parameters()), names["layers"], names["width"]
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| .* \| ([\d.]+) MB \|$", table, re.MULTILINE)
    assert len(rows) == 6
    for way, ranks, sent in rows:
        name, most_ranks, least, most = BOUNDS[way]
        if (ranks := int(ranks.replace(",", ""))) <= most_ranks:
            job = which.Job(*size, ranks // 8, 8, collectives.TOKENS // 8, mixed=False)
            share = 1e6 * float(sent) / sum(which.sent(name, job))
            assert least - 0.002 < share < most + 0.002, (way, ranks)
