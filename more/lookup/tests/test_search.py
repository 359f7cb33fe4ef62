"""The search of diffs/index.html: a text brings the entry that answers it.

strangers.json has wordings of people who had not seen the repository, pasted.json messages from
public threads, and asked.json questions in a few words: [[beginnings of the answers' ids, texts]].
foreign.json has texts that nothing here answers. No text stands in the search words of an entry.
"""

import json
from pathlib import Path

import pytest
from browser import NEEDS_BROWSER, PAGE, check
from playwright.sync_api import expect

FIND = """texts => {
    find ??= finder([...document.querySelectorAll(".entry, article:has(.note)")].map(read));
    return texts.map(text => find(text.replaceAll("\\n", " ")).slice(0, 3).map(
        hit => [hit.element.id, Boolean(hit.sure)]));
}"""  # what is pasted into the box has no line breaks
pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def page(browser):
    """The page on a phone, in the dark, opened once for all tests."""
    size = {"width": 390, "height": 844}
    page = browser.new_page(viewport=size, color_scheme="dark", offline=True)
    page.goto(PAGE.as_uri())
    return page


def texts_of(name):
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "within", "least"), [("strangers", 1, 0.70), ("pasted", 1, 0.85), ("asked", 3, 0.80)]
)
def test_most_texts_bring_their_answer(page, name, within, least):
    asked = [(text, tuple(answers)) for answers, texts in texts_of(name) for text in texts]
    found = page.evaluate(FIND, [text for text, _ in asked])
    missed = [
        (text, answers, hits)
        for (text, answers), hits in zip(asked, found, strict=True)
        if not any(link.startswith(answers) for link, _ in hits[:within])
    ]
    assert 1 - len(missed) / len(asked) >= least, missed


def test_a_hit_that_is_called_sure_is_right(page):
    asked = [(text, tuple(answers)) for answers, texts in texts_of("strangers") for text in texts]
    hits = [hits[0] for hits in page.evaluate(FIND, [text for text, _ in asked]) if hits]
    right = [link.startswith(answers) for (link, sure), (_, answers) in zip(hits, asked) if sure]
    assert sum(right) >= 0.85 * len(right) and len(right) > 0.5 * len(asked)
    foreign = page.evaluate(FIND, texts_of("foreign"))
    assert sum(sure for hits in foreign for _, sure in hits[:1]) <= 0.1 * len(foreign)


def test_a_hit_is_the_whole_entry_and_reached_by_keyboard(page):
    search, hits = page.locator("#search"), page.locator("#hits")
    search.fill("environment variable RANK expected, but not set")
    first = hits.locator("details").first
    (link,) = first.locator("[data-hit]").evaluate_all("all => all.map(link => link.hash)")
    code = page.locator(f"{link} pre code").all_text_contents()
    assert code and first.locator("pre code").all_text_contents() == code
    expect(first).to_contain_text(page.locator(f"{link} p").last.text_content())
    search.fill("which GPUs are free")
    dagger = "† from the linked source; we have not tried it"
    expect(first.locator(".dagger")).to_have_text(dagger)
    search.fill("how do I bake bread")
    expect(hits).to_contain_text("No entry is surely about this. The nearest:")
    search.fill("zzzzzz")
    expect(hits).to_contain_text("Try the last line of the error")
    search.fill("watchdog caught collective operation timeout ran for 600013 milliseconds")
    search.press("ArrowDown")
    expect(hits.locator("summary").first).to_be_focused()
    search.press("Enter")
    expect(page.locator(".entry:target :is(h3, h4, h5)").first).to_be_in_viewport()
    search.fill("hangs")
    check(page, ".search")  # at the end: it removes what is hidden
