"""The pictures are self-contained, and what they show is correct."""

import importlib
import re
from fractions import Fraction
from xml.etree import ElementTree

import pytest
from support.scripts import ROOT
from torch.utils.data.distributed import DistributedSampler

PICTURES = sorted((ROOT / "diffs" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def picture(name):
    return ElementTree.parse(ROOT / "diffs" / "pictures" / f"{name}.svg").getroot()


def numbers(text):
    return [
        Fraction(number) for number in re.findall(r"-?[\d.]+", text.replace("\N{MINUS SIGN}", "-"))
    ]


def by_rank(root, within):
    """Return the numbers in each rank's cells, in order: {rank: numbers}."""
    ranks = {}
    for cell in root.iterfind(f".//*[{within}]//*[@data-rank]"):
        ranks.setdefault(int(cell.get("data-rank")), []).extend(numbers(cell.text))
    return ranks


def test_these_are_all():
    assert [path.stem for path in PICTURES] == [
        "all-reduce",
        "holds-fsdp2_gpt",
        "holds-hybrid_sharding",
        "holds-local_sgd",
        "holds-pipeline",
        "holds-tensor_parallel",
        "holds-two_dimensional",
        "holds-zero_optimizer",
        "holds",
        "life-of-a-job",
        "ranks",
        "sampler",
    ]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_it_needs_no_other_file_and_styles_nothing_else(path):
    text, root = path.read_text(encoding="utf-8"), picture(path.stem)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert numbers(root.get("viewBox")) == [0, 0, int(root.get("width")), int(root.get("height"))]
    title, description = (root.find(f"{SVG}{name}") for name in ("title", "desc"))
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert title.text
    assert len(description.text) > 100
    assert not re.search(r"href|url\(|@import|<script|<!(?!-- Written by)|<\?|\son\w+=", text)
    assert text.count("http") == 1  # the XML namespace
    style = root.find(f"{SVG}style").text
    assert "prefers-color-scheme: dark" in style
    selectors = set(re.findall(r"^(?!@media|\})(.+?) \{", style, re.MULTILINE))
    used = {word for part in root.iter() for word in part.get("class", "").split()}
    assert selectors == {f".{name}" for name in used}
    names = used | {part.get("id") for part in root.iter() if part.get("id")}
    assert all(name.startswith(f"{path.stem}-") for name in names)


def test_ranks_count_over_the_nodes():
    found = []
    for part in picture("ranks").iterfind(".//*[@data-rank]"):
        node, local, rank = (
            int(part.get(f"data-{name}")) for name in ("node", "local-rank", "rank")
        )
        assert rank == node * 4 + local
        texts = [text.text for text in part.iter(f"{SVG}text")]
        assert texts == [f"rank {rank}", f"local rank {local}"]
        found.append((node, local))
    assert found == [(node, local) for node in range(2) for local in range(4)]


def test_the_all_reduce_averages():
    root = picture("all-reduce")
    own, after = (by_rank(root, f"@data-row='{row}'") for row in ("own", "average"))
    assert list(own) == list(after) == [0, 1, 2]
    columns = list(zip(*own.values(), strict=True))
    averages = [sum(column) / 3 for column in columns]
    assert all(numbers == averages for numbers in after.values())
    sums = [numbers(text.text) for text in root.iterfind(".//*[@data-average]")]
    assert sums == [[*column, 3, sum(column) / 3] for column in columns]


def test_the_sampler_assigns_these_samples():
    root = picture("sampler")
    shards = {r: list(DistributedSampler(range(10), 3, r, shuffle=False)) for r in range(3)}
    assert by_rank(root, "@data-way='DistributedSampler'") == shards
    assert by_rank(root, "@data-way='step 5'") == {r: list(range(r, 10, 3)) for r in range(3)}
    padding = [cell.text for cell in root.iterfind(".//*[@data-padding]")]
    assert padding == ["0", "1"]


SPLIT = ["parameters", "gradients", "optimizer"]


@pytest.mark.parametrize("name", [path.stem for path in PICTURES if "holds" in path.stem])
def test_ranks_hold_what_the_formulae_say(name, monkeypatch):
    """Into as many parts as which.py splits it among two nodes of two GPUs; none is missing."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    which = importlib.import_module("which")
    for panel in picture(name).iterfind(".//*[@data-way]"):
        way = panel.get("data-way")
        layout = (1, 4) if way == "tensor_parallel" else (2, 2)
        job = which.Job(1e9, 4, 64, *layout, tokens=1)
        parts_of = which.parts("ddp" if way == "local_sgd" else way, job)
        for what, parts in zip(SPLIT, parts_of, strict=True):
            cells = panel.findall(f".//*[@data-what='{what}']")
            assert [int(cell.get("data-rank")) for cell in cells] == [0, 1, 2, 3]
            assert {len(cell.get("data-held")) for cell in cells} == {4 // parts}
            assert {*"".join(cell.get("data-held") for cell in cells)} == {*"0123"}
            for cell in cells:
                drawn = [box.get("class").endswith("-held") for box in cell]
                assert drawn == [str(quarter) in cell.get("data-held") for quarter in range(4)]
