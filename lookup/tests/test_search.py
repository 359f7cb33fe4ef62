"""The search of diffs/index.html: a pasted text brings the entry that explains it.

The texts in pasted.json are quoted from the threads beside them.
"""

import json
import re

import pytest
from browser import NEEDS_BROWSER, PAGE, check
from playwright.sync_api import expect
from support.scripts import ROOT

PASTED = json.loads((ROOT / "lookup" / "tests" / "pasted.json").read_text(encoding="utf-8"))
ASKED = [  # typed in a few words, and a piece of one of the first three hits
    ("invalid device ordinal with one GPU", "invalid device ordinal"),
    ("two RTX 4090 hang in DDP(model) 100%", "Hangs or freezes"),
    ("out of memory only on rank 0", "on rank 0 only"),
    ("all processes on GPU 0 in nvidia-smi", "lists all processes on GPU 0"),
    ("training suddenly slow, one straggler", "straggler"),
    ("two GPUs not faster than one", "Two GPUs are no faster"),
    ("P2P is disabled between connected GPUs", "P2P is disabled"),
    ("Address already in use", "The server socket has failed to listen"),
    ("LoRA PEFT DDP", "LoRA adapters"),
    ("7B model on 24 GB GPUs fully_shard hugging face", "shard a Hugging Face model"),
    ("RuntimeError: No rendezvous handler for env://", "for env:// (on Windows)"),
    ("split_dataset_by_node", "Every GPU gets the same data"),
    ("export ONNX", "export to ONNX"),
    ("loss becomes nan with multiple gpus", "becomes NaN"),
    ("GPU memory still used after ctrl-c", "stays in use after Ctrl-C"),
    ("windows libuv", "libuv"),
    ("macOS mps", "DDP on a Mac"),
    ("AWS security group ports", "which ports do I open"),
    ("kubernetes rendezvous timeout", "On Kubernetes"),
    ("jupyter notebook multiple gpus", "notebook"),
    ("exit code 137", "exitcode : -9"),
    ("segmentation fault exitcode -11", "exitcode : -11"),
    ("NCCL_ASYNC_ERROR_HANDLING", "NCCL's variables"),
    ("same data order every epoch", "Every epoch trains on the samples in the same order"),
    ("gradient accumulation", "Gradient accumulation"),
    ("wrap the model in DDP", "Wrap the model"),
    ("scale learning rate with more GPUs", "earning rate"),
    ("pdb torchrun", "How do I use pdb under torchrun"),
    ("vscode debugger", "How do I debug a rank in VS Code"),
    ("optuna hyperparameter search", "search for hyperparameters"),
    ("webdataset parquet hdf5", "My data does not fit into memory"),
    ("unequal GPUs", "nequal GPUs"),
    ("AMD ROCm", "AMD, Intel"),
    ("CUDA_VISIBLE_DEVICES", "all GPUs, or on some of them"),
    ("use only two GPUs with CUDA_VISIBLE_DEVICES", "all GPUs, or on some of them"),
    ("resume on 4 GPUs a checkpoint of 8", "resume with a different number"),
    ("wandb sweep torchrun", "W&B sweep"),
    ("pytorch lightning slurm ntasks-per-node", "Lightning"),
    ("ds_config zero_to_fp32", "DeepSpeed"),
    ("RTX 5090 sm_120", "sm_120"),
    ("RuntimeError: CUDA error: invalid device ordinal", "on one machine"),
    ("torchrun windows", "use_libuv"),
    ("torch.distributed.launch --local-rank", "torch.distributed.launch to torchrun"),
    ("DeepSpeed", "DeepSpeed: what it takes"),
    ("hugging face trainer", "Hugging Face"),
    ("lightning fabric", "Fabric"),
    ("docker options", "Docker"),
    ("Kubeflow PyTorchJob", "Kubeflow"),
    ("SageMaker distributed training", "SageMaker"),
    ("EFA install", "EFA on AWS"),
    ("spot instance interruption notice", "pot machine"),
    ("num_workers per GPU", "num_workers"),
    ("inference on multiple GPUs", "inference"),
    ("F1 AUC over all ranks", "F1, AUC"),
    ("OneCycleLR steps_per_epoch multi GPU", "steps_per_epoch"),
    ("wandb one run per GPU", "wandb"),
    ("share dataset between processes RAM", "share one copy"),
    ("bucket_cap_mb", "bucket_cap_mb"),
    ("same seed on every rank", "same seed"),
    ("batch size and learning rate with 4 GPUs", "batch size and learning rate"),
    ("model with 3 billion parameters on 40 GB GPUs", "3 billion parameters"),
    ("Megatron or torchtitan", "another library is the better choice"),
    ("ssh two machines without slurm", "Two machines over ssh"),
    ("loss higher with 4 GPUs than with one", "The loss is higher with several GPUs"),
    ("loss normalized by number of tokens per rank", "normalized by the number of tokens"),
    ("Last error: Cuda failure 802 'system not yet initialized'", "Error 802"),
]
PASTE = """(search, texts) => texts.map(text => {
    search.value = text;
    search.dispatchEvent(new Event("input"));
    return [...document.querySelectorAll("[data-hit]")].map(hit => {
        const entry = document.getElementById(hit.hash.slice(1));
        const messages = entry?.matches(".entry") ? entry.textContent : "";
        return [hit.querySelector("b").textContent, hit.getAttribute("href"), messages];
    });
})"""  # by hand, a text takes a tenth of a second
KINDS = [  # what is searched, and where its hits lead
    ("watchdog timeout", "#see-"),
    ("activation checkpointing less memory for more computation", "#recipe-"),
    ("weights changed on one rank only", "#pitfall-"),
    ("join the process group", "#01-to-02-"),
    ("practise on your own machine", "../slurm/README.md#"),
]
WEAK = ["AssertionError", "RuntimeError", "qwertz uiopü", "how do I bake bread"]

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def page(browser):
    """The page on a phone, in the dark, opened once for all tests."""
    size = {"width": 390, "height": 844}
    page = browser.new_page(viewport=size, color_scheme="dark", offline=True)
    page.goto(PAGE.as_uri())
    return page


def plain(text):
    return re.sub(r"[\s`…]+", " ", text).strip()


def hits(page, *texts):
    """Paste each text; return what it brings: [(title, address, text of the entry)] for each."""
    search = page.locator("#search")
    search.fill("")
    return search.evaluate(PASTE, texts)


def test_a_pasted_text_brings_its_entry_first(page):
    wrong, addresses = [], set()
    for pasted, found in zip(PASTED, hits(page, *(pasted["text"] for pasted in PASTED))):
        if not found or plain(pasted["row"]) not in plain(found[0][0] + found[0][2]):
            wrong.append((pasted["row"], pasted["source"], found[:2]))
        addresses |= {address[1:] for _, address, _ in found if address[0] == "#"}
    assert wrong == []
    there = "ids => ids.filter(id => !document.getElementById(id))"
    assert page.evaluate(there, sorted(addresses)) == []


def test_a_question_in_a_few_words(page):
    for (text, wanted), found in zip(ASKED, hits(page, *(text for text, _ in ASKED))):
        assert any(wanted in plain(title) for title, _, _ in found[:3]), (text, found[:3])


def test_it_finds_everything_and_hides_weak_hits(page):
    for (text, start), found in zip(KINDS, hits(page, *(text for text, _ in KINDS))):
        assert found[0][1].startswith(start), text
    assert hits(page, *WEAK) == [[]] * len(WEAK)
    expect(page.locator("#hits")).to_contain_text("Try the last line of the error")


def test_the_hits_are_used_by_keyboard(page):
    search = page.locator("#search")
    search.fill("hangs")
    links = page.locator("[data-hit]")
    search.press("ArrowDown")
    expect(links.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    page.keyboard.press("Escape")
    expect(links.first).to_be_hidden()
    expect(search).to_be_focused()
    search.fill("watchdog caught collective operation timeout ran for 600013 milliseconds")
    search.press("Enter")
    entry = page.locator(".entry:target")
    expect(entry).to_contain_text("Watchdog caught collective operation timeout")
    expect(entry.locator("h5")).to_be_in_viewport()
    expect(links.first).to_be_hidden()


def test_the_first_hit_says_what_to_type(page):
    search, first = page.locator("#search"), page.locator("#hits > div").first
    search.fill("KeyError: 'SLURM_PROCID'")
    expect(first).to_contain_text("srun python train.py")  # a list, where it depends
    search.fill("environment variable RANK expected, but not set")
    first.get_by_role("button", name="Copy").press("Enter")
    expect(first.get_by_role("button")).to_have_text("Copied")
    search.fill("")
    search.press("Control+V")
    assert search.input_value().startswith("torchrun --standalone")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    check(page, ".search")  # at the end: it removes what is hidden
