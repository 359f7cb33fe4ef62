"""The page diffs/index.html in a real browser: complete, on any screen, by keyboard alone."""

import re
from urllib.parse import unquote

import hunks
import patches
import pytest
from browser import NEEDS_BROWSER, PAGE, SIZES, check
from playwright.sync_api import expect
from support.scripts import ROOT

DIFFS = hunks.explained(ROOT)
TABS = [*(diff.slug for diff in DIFFS), *patches.KINDS, "troubleshooting"]
CHANGED = """element => [...element.querySelectorAll(".code del, .code ins")].map(
  line => (line.tagName === "DEL" ? "-" : "+") + line.textContent)"""

pytestmark = [NEEDS_BROWSER, pytest.mark.slow]


def test_it_is_one_file_of_a_size_that_one_sends():
    """What it loads is checked wherever a test visits it."""
    assert PAGE.stat().st_size < 1_300_000


def test_all_hunks_are_shown_with_their_notes_and_the_whole_files(visit):
    page = visit()
    for diff in DIFFS:
        page.get_by_role("navigation").get_by_role("link", name=diff.name).click()
        step = page.locator(f'[id="{diff.slug}"]')
        expect(step).to_be_visible()
        for part in diff.told:
            article = step.locator(f'[id="{diff.slug}-{part.slug}"]')
            if isinstance(part, hunks.Aside):
                assert part.title in article.locator("h3").inner_text()
                continue
            assert part.note.title in article.locator("h3").inner_text()
            assert article.evaluate(CHANGED) == part.changed
            assert article.locator(".tests li").all_text_contents() == part.note.tests
            for title, _ in part.note.links:
                assert title in article.locator(".note").inner_text()
        assert step.locator(".code > :not(del)").all_text_contents() == diff.new_lines
        for line, link in zip(diff.lesson, step.locator(".lesson li a").all(), strict=True):
            link.click()
            expect(page.locator("article:target h3")).to_be_in_viewport()
            added = page.locator("article:target ins").all_text_contents()
            assert any(text.strip().startswith(line.code) for text in added)


def test_all_recipes_and_pitfalls_are_shown(visit):
    page = visit()
    for kind in patches.KINDS:
        page.get_by_role("navigation").get_by_role("link", name=kind.capitalize()).click()
        members = patches.collect(ROOT, kind)
        expect(page.locator("article:visible")).to_have_count(len(members))
        for patch in members:
            article = page.locator(f"#{patch.slug}")
            wanted = [line for hunk in patch.diff.hunks for line in hunk.changed]
            assert article.evaluate(CHANGED) == wanted
            assert article.locator(".command > code").text_content() == patch.command
            assert article.locator(".tests li").all_text_contents() == patch.tests


@pytest.mark.parametrize("clipboard", [True, False])
def test_a_command_is_copied_by_keyboard(visit, clipboard):
    """Some browsers keep the clipboard from a page that is a file."""
    page = visit("#pitfalls", "laptop")
    if not clipboard:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    article = page.locator("#pitfall-no-set-epoch")
    article.get_by_role("button", name="Copy the command of No set_epoch").press("Enter")
    expect(page.get_by_role("status")).to_have_text("The command is copied.")
    page.get_by_role("searchbox").press("Control+V")
    command = article.locator("code", has_text="patch -o").text_content()
    assert page.get_by_role("searchbox").input_value() == command.replace("\n", " ")


def test_by_keyboard_alone(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the diffs"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "search"
    for diff in DIFFS[:2]:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent").startswith(diff.name)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator(f'[id="{DIFFS[1].slug}"]')).to_be_visible()
    expect(page.locator(f'[id="{DIFFS[0].slug}"]')).to_be_hidden()
    line = page.locator("details.fold:visible .code > *").first
    expect(line).to_be_hidden()
    page.get_by_role("button", name="Unfold all").press("Space")
    expect(line).to_be_visible()
    for following in TABS[2:]:
        page.get_by_role("link", name="Next: ").press("Enter")
        heading = page.locator(f'[id="{following}-title"]')
        expect(heading).to_be_in_viewport()
        expect(heading).to_be_focused()


@pytest.mark.parametrize("size", SIZES)
def test_each_hunk_has_a_permanent_link(visit, size):
    page = visit(size=size)
    for diff in (DIFFS[0], DIFFS[-1]):
        link = page.locator(f'a.link[href="#{diff.slug}-{diff.hunks[-1].slug}"]')
        page.goto(f"{PAGE.as_uri()}{link.get_attribute('href')}")
        expect(page.locator("nav a[aria-current]")).to_contain_text(diff.name)
        expect(link).to_be_in_viewport()
        bar = page.locator(".search").bounding_box()
        assert link.bounding_box()["y"] >= bar["y"] + bar["height"]
    assert unquote(page.url).endswith(DIFFS[-1].hunks[-1].slug)


def test_nothing_is_scrolled_sideways_and_no_line_is_wrapped_on_a_laptop(visit):
    for size in ("phone", "tablet", "laptop"):
        page = visit(size=size)
        for slug in TABS:
            page.goto(f"{PAGE.as_uri()}#{slug}")
            page.evaluate("document.querySelectorAll('details').forEach(o => { o.open = true })")
            assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0], slug
            heights = page.locator("article.hunk:not(.patch):visible .code > *").evaluate_all(
                "all => [...new Set(all.map(line => Math.round(line.clientHeight / 19)))]"
            )
            assert size != "laptop" or heights in ([], [1]), slug


@pytest.mark.parametrize(
    ("tab", "scheme", "size"),
    [
        ("01-to-02", "light", "laptop"),
        ("04-to-05", "dark", "phone"),
        pytest.param(
            *("pitfalls", "light", "wide"),
            marks=pytest.mark.weekly("47 articles of the same markup take axe a minute"),
        ),
    ],
)
def test_it_is_accessible(visit, tab, scheme, size):
    """Check contrast, landmarks and names with axe, with everything unfolded."""
    page = visit(f"#{tab}", size, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    check(page)
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1


def test_everything_is_there_without_javascript_and_on_paper(visit):
    count = sum(len(diff.told) for diff in DIFFS)
    page = visit(java_script_enabled=False)
    assert page.locator("article:visible").count() > count
    assert not page.get_by_role("button").is_visible()
    page = visit()
    assert 10 < len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))) < 45
    page.emulate_media(media="print")
    assert page.locator("article:visible").count() == count
