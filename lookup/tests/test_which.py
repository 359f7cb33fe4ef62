"""What lookup/which.md says is computed, and close to what is counted."""

import re
import statistics
from itertools import accumulate

import collectives
import pytest
import torch
import which
from patching import page
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile

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


def test_the_tables_are_computed():
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_formulae_are_close_to_what_the_recipe_counts(name):
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


@pytest.mark.slow
def test_what_is_sent_is_on_the_page_and_is_what_the_formulae_say():
    """For the GPT of collectives.py, in float32."""
    counted = collectives.counted()
    assert which.table(*collectives.rows(counted)) in page("benchmarks/README")
    model, names = collectives.gpt()
    size = sum(p.numel() for p in model.parameters()), names["layers"], names["width"]
    for way, name, most_ranks, least, most in (
        ("DDP", "ddp", 4096, 1, 1),
        ("FSDP2", "fsdp2_gpt", 64, 0.97, 1),  # gathers the embeddings and the head once
        ("2-D", "two_dimensional", 512, 1, 1.15),  # which are not split here
    ):
        for ranks in filter(lambda ranks: ranks <= most_ranks, collectives.WORLDS):
            job = which.Job(*size, ranks // 8, 8, collectives.TOKENS // 8, mixed=False)
            sent = collectives.sent(way, ranks, counted[way][ranks])
            share = sent / sum(which.sent(name, job))
            assert least <= round(share, 9) <= most, (way, ranks)
