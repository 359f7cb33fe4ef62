"""The search of diffs/index.html: a pasted text brings the row that explains it.

The texts in pasted.json are quoted from the threads beside them.
"""

import json
import re
import shutil

import pytest
from browser import check
from playwright.sync_api import expect, sync_playwright
from support.scripts import ROOT

BROWSER = shutil.which("chromium")
PAGE = ROOT / "diffs" / "index.html"
MESSAGES = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("lookup/*.md"))
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
    ("RuntimeError: No rendezvous handler for env://", "for env:// on Windows"),
    ("split_dataset_by_node", "each process still has the total number"),
    ("export ONNX", "export to ONNX"),
    ("loss becomes nan with multiple gpus", "becomes NaN"),
    ("GPU memory still used after ctrl-c", "stays in use after Ctrl-C"),
    ("windows libuv", "libuv"),
    ("macOS mps", "DDP on a Mac"),
    ("AWS security group ports", "which ports do I open"),
    ("kubernetes rendezvous timeout", "On Kubernetes"),
    ("jupyter notebook multiple gpus", "notebook"),
    ("exit code 137", "exitcode: -9"),
    ("segmentation fault exitcode -11", "exitcode: -11"),
    ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("same data order every epoch", "Every epoch trains on the samples in the same order"),
    ("gradient accumulation", "Gradient accumulation"),
    ("wrap the model in DDP", "Wrap the model"),
    ("scale learning rate with more GPUs", "earning rate"),
    ("pdb torchrun", "How do I use pdb under torchrun"),
    ("vscode debugger", "How do I debug a rank in VS Code"),
    ("optuna hyperparameter search", "search for hyperparameters"),
    ("webdataset parquet hdf5", "My data does not fit into memory"),
    ("unequal GPUs", "My GPUs are not equal"),
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
    ("hugging face trainer", "Trainer"),
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
    ("how big a model fits on 8 GPUs of 80 GB", "size of the model"),
    ("ssh two machines without slurm", "Two machines over ssh"),
]
PASTE = """(search, texts) => texts.map(text => {
    search.value = text;
    search.dispatchEvent(new Event("input"));
    const all = [...document.querySelectorAll("[data-hit]")];
    return all.map(hit => [hit.querySelector("b").textContent, hit.getAttribute("href")]);
})"""  # by hand, a text takes a tenth of a second
KINDS = [  # what is searched, and where its hits lead
    ("watchdog timeout", "#see-"),
    ("activation checkpointing less memory for more computation", "#recipe-"),
    ("weights changed on one rank only", "#pitfall-"),
    ("join the process group", "#01-to-02-"),
    ("practise on your own machine", "../slurm/README.md#"),
]

pytestmark = pytest.mark.skipif(not BROWSER, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def page():
    """The page on a phone, in the dark, opened once for all tests."""
    with sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        args += ["--disable-component-update", "--disable-sync"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=args)
        size = {"width": 390, "height": 844}
        page = browser.new_page(viewport=size, color_scheme="dark", offline=True)
        page.goto(PAGE.as_uri())
        yield page
        browser.close()


def plain(text):
    return re.sub(r"[\s`…]+", " ", text)


def hits(page, *texts):
    """Paste each text; return what it brings: [(title, address)] for each."""
    search = page.locator("#search")
    search.fill("")
    found = search.evaluate(PASTE, texts)
    return [[(plain(title), address) for title, address in each] for each in found]


def test_a_pasted_text_brings_its_row_first(page):
    assert len(PASTED) >= 60
    wrong, addresses = [], set()
    for pasted, found in zip(PASTED, hits(page, *(pasted["text"] for pasted in PASTED))):
        if not found or plain(pasted["row"]).strip() not in found[0][0]:
            wrong.append((pasted["row"], pasted["source"], found[:2]))
        addresses |= {address[1:] for _, address in found if address[0] == "#"}
    assert wrong == []
    there = "ids => ids.filter(id => !document.getElementById(id))"
    assert page.evaluate(there, sorted(addresses)) == []


def test_the_texts_are_not_taken_from_the_page():
    shown = plain(MESSAGES)
    for pasted in PASTED:
        assert plain(pasted["text"]) not in shown
        assert pasted["source"].startswith("https://")


def test_a_question_in_a_few_words(page):
    for (text, wanted), found in zip(ASKED, hits(page, *(text for text, _ in ASKED))):
        assert any(wanted in title for title, _ in found[:3]), (text, found[:3])


@pytest.mark.slow
def test_it_is_on_each_tab_and_finds_everything(page):
    for tab in ("#pitfalls", "#01-to-02"):
        page.goto(f"{PAGE.as_uri()}{tab}")
        expect(page.locator("input[type=search]")).to_have_count(1)
        expect(page.locator("input[type=search]")).to_be_visible()
    for (text, start), found in zip(KINDS, hits(page, *(text for text, _ in KINDS))):
        assert found[0][1].startswith(start), text


def test_the_hits_are_used_by_keyboard(page):
    search = page.locator("#search")
    search.fill("watchdog caught collective operation timeout")
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
    row = page.locator("tr", has_text="Watchdog caught collective operation timeout").first
    expect(row).to_be_in_viewport()
    expect(row).to_be_focused()
    expect(links.first).to_be_hidden()


def test_nothing_found_says_what_to_try(page):
    assert hits(page, "qwertz uiopü") == [[]]
    expect(page.locator("#hits")).to_contain_text("Try the last line of the error")
    assert hits(page, "") == [[]]
    expect(page.locator("#hits")).to_be_hidden()


@pytest.mark.slow
def test_the_hits_are_accessible(page):
    page.locator("#search").fill("CUDA error: invalid device ordinal")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    check(page, ".search")
