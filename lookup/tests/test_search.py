"""The search of diffs/index.html: a pasted text brings the entry that explains it.

The texts in pasted.json are from the threads beside them, or a GPU. Those in asked.json are typed
in a few words; the second is a piece of one of the first three hits, or null: better to show none;
or, with a "#", where the first one leads. Those in strangers.json are wordings that are no aliases.
"""

import json
import re

import pytest
from browser import NEEDS_BROWSER, PAGE, check
from playwright.sync_api import expect
from support.scripts import ROOT

PASTED, ASKED, STRANGERS, FOREIGN = (
    json.loads((ROOT / "lookup" / "tests" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("pasted", "asked", "strangers", "foreign")
)
PASTE = """(search, texts) => texts.map(text => {
    search.value = text.replaceAll("\\n", " ");  // as a browser pastes into one line
    search.dispatchEvent(new Event("input"));
    return [...document.querySelectorAll("[data-hit]")].map(hit => {
        const entry = document.getElementById(hit.hash.slice(1));
        const said = entry.matches(".entry") ? entry.textContent : "";
        const title = hit.querySelector("b").textContent;
        const texts = [title, said, ...(ALIASES[entry.id] ?? [])].map(bare);
        return [title, hit.getAttribute("href"), texts.join(" | ")];
    });
})"""  # by hand, a text takes a tenth of a second
BARE = """function bare(text) {  // as the page keeps the wordings
    return words(text).filter(word => !COMMON.has(word.toLowerCase())).join(" ");
}"""
BEST = "texts => texts.map(find).map(([first]) => first && [first.link, first.sure])"
pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def page(browser):
    """The page on a phone, in the dark, opened once for all tests."""
    size = {"width": 390, "height": 844}
    page = browser.new_page(viewport=size, color_scheme="dark", offline=True)
    page.goto(PAGE.as_uri())
    page.locator("#search").fill("")  # once it can be used
    page.add_script_tag(content=BARE)
    return page


def plain(text):
    return re.sub(r"[\s`…]+", " ", text).strip()


def hits(page, *texts):
    """Paste each text; return what it brings: [(title, address, text of the entry)] for each."""
    return page.locator("#search").evaluate(PASTE, texts)


def test_a_pasted_text_brings_its_entry_first(page):
    wrong = []
    rows = page.evaluate("rows => rows.map(bare)", [pasted["row"] for pasted in PASTED])
    for row, pasted, found in zip(rows, PASTED, hits(page, *(one["text"] for one in PASTED))):
        if not found or row not in found[0][2]:
            wrong.append((pasted["row"], pasted["source"], [hit[:2] for hit in found[:2]]))
    assert wrong == []


def test_a_question_in_a_few_words(page):
    wrong = []
    for (text, wanted), found in zip(ASKED, hits(page, *(text for text, _ in ASKED))):
        if wanted is None:
            right = found == []
        elif wanted[0] == "#":
            right = found != [] and found[0][1].startswith(wanted)
        else:
            right = any(wanted in plain(title) for title, _, _ in found[:3])
        if not right:
            wrong.append((text, wanted, [title for title, *_ in found[:3]]))
    assert wrong == []
    page.locator("#search").fill("how do I bake bread")
    expect(page.locator("#hits")).to_contain_text("Try the last line of the error")


def test_strangers_words(page):
    """Words that were not made for it: most lead to the right page, few to a wrong one."""
    pasted = [(tuple(right), text) for right, texts in STRANGERS for text in texts]
    found = zip(pasted, page.evaluate(BEST, [text for _, text in pasted]))
    shown = [(hit[0][1:].startswith(right), hit[1]) for (right, _), hit in found if hit]
    first = sum(first for first, _ in shown)
    assert first > 840  # of 1,132
    assert first / len(shown) > 0.78
    assert sum(first and sure for first, sure in shown) > 0.86 * sum(sure for _, sure in shown)
    assert sum(hit is not None for hit in page.evaluate(BEST, FOREIGN)) <= 6  # of 32


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
    # the remedy of a page that is a patch:
    search.fill("every epoch has the same order, although set_epoch is called")
    expect(first).to_contain_text("Leave out persistent_workers=True if")
    expect(first.get_by_role("button")).to_have_count(0)  # nobody types prose
    search.fill("environment variable RANK expected, but not set")
    first.get_by_role("button", name="Copy").press("Enter")
    expect(first.get_by_role("button")).to_have_text("Copied")
    search.fill("")
    search.press("Control+V")
    assert search.input_value().startswith("torchrun --standalone")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    cut = "collect().entries.filter(({ why, typed }) => why.trim().endsWith(':') && !typed.length)"
    assert page.evaluate(cut) == []
    check(page, ".search")  # at the end: it removes what is hidden
