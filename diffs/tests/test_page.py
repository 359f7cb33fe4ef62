"""The page diffs/index.html in a real browser: complete, on any screen, by keyboard alone."""

import hunks
import pytest
from browser import NEEDS_BROWSER, PAGE, SIZES, check
from playwright.sync_api import expect
from support.scripts import ROOT

DIFFS = hunks.annotated_diffs(ROOT)
TABS = ["start", *(diff.slug for diff in DIFFS), "recipes", "pitfalls", "troubleshooting"]
OPEN = "document.querySelectorAll('details').forEach(fold => { fold.open = true })"
pytestmark = [NEEDS_BROWSER, pytest.mark.slow]


def test_it_shows_the_whole_of_each_step_and_its_lesson_leads_to_the_lines(visit):
    page = visit()
    for diff in DIFFS:
        page.get_by_role("navigation").get_by_role("link", name=diff.name).click()
        step = page.locator(f'[id="{diff.slug}"]')
        assert step.locator(".code > :not(del)").all_text_contents() == diff.new_lines
        for link in step.locator(".intro ol a").all():
            link.press("Enter")  # a click would scroll to the link while the page scrolls
            target = page.locator("article:target")
            expect(target.locator("h3")).to_be_in_viewport()
            expect(target.locator("ins").filter(has_text=link.text_content())).to_have_count(1)


def test_by_keyboard_alone(visit):
    page = visit()
    focused = page.locator(":focus")
    for text in ("Skip to the diffs", "", "Start", DIFFS[0].name):  # the second: the search
        page.keyboard.press("Tab")
        expect(focused).to_contain_text(text)
    focused.press("Enter")
    expect(page.locator(f'[id="{DIFFS[0].slug}"]')).to_be_visible()
    expect(page.locator("#start")).to_be_hidden()
    line = page.locator("details.fold:visible .code > *").first
    expect(line).to_be_hidden()
    page.get_by_role("button", name="Unfold all").press("Space")
    expect(line).to_be_visible()
    for following in TABS[2:]:
        page.get_by_role("link", name="Next: ").press("Enter")
        heading = page.locator(f'[id="{following}-title"]')
        expect(heading).to_be_in_viewport()
        expect(heading).to_be_focused()


@pytest.mark.parametrize("size", ["phone", "wide"])
def test_a_permanent_link_leads_below_the_bar_and_nothing_is_scrolled_sideways(visit, size):
    diff = DIFFS[-1]
    page = visit(size=size)
    link = page.locator(f'a.link[href="#{diff.slug}-{diff.hunks[-1].note.slug}"]')
    page.goto(f"{PAGE.as_uri()}{link.get_attribute('href')}")
    expect(page.locator("nav a[aria-current]")).to_contain_text(diff.name)
    expect(link).to_be_in_viewport()
    bar = page.locator(".search").bounding_box()
    assert link.bounding_box()["y"] >= bar["y"] + bar["height"]
    for slug in TABS:
        page.goto(f"{PAGE.as_uri()}#{slug}")
        page.evaluate(OPEN)
        assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0], slug


@pytest.mark.parametrize(
    ("anchor", "scheme", "size"),
    [("start", "light", "laptop"), ("01-to-02", "dark", "phone"), ("03-to-04", "dark", "phone")],
)
def test_it_is_accessible(visit, anchor, scheme, size):
    """Check contrast, landmarks and names with axe, with everything unfolded."""
    page = visit(f"#{anchor}", size, color_scheme=scheme)
    page.evaluate(OPEN)
    for button in page.get_by_role("button", name="Run the whole step").all():
        button.click()  # for the colours of the figure
    check(page)


def test_everything_is_there_without_javascript(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("article:visible").count() == page.locator("article").count() > 0
    assert not page.get_by_role("button").is_visible()
