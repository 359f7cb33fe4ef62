"""The page diffs/index.html in a real browser: complete, foldable, accessible."""

import re
from itertools import pairwise
from urllib.parse import unquote

import hunks
import patches
import pytest
from playwright.sync_api import expect
from browser import NEEDS_BROWSER, PAGE, SIZES, check
from support.scripts import ROOT, SCRIPTS

DIFFS = hunks.explained(ROOT)
ALL = [(diff, hunk) for diff in DIFFS for hunk in diff.hunks]
AFTER = [*patches.KINDS, "troubleshooting"]
TABS = [*(diff.slug for diff in DIFFS), *AFTER]
IN_ORDER = [*TABS[: len(DIFFS)], "01-to-05", *AFTER]
SLOW = pytest.mark.slow
AGAIN = pytest.mark.weekly

pytestmark = [NEEDS_BROWSER, SLOW]


def test_all_hunks_are_shown_with_their_notes(visit):
    page = visit()
    for diff in DIFFS:
        page.get_by_role("link", name=f"{diff.name} {diff.title}").click()
        shown = page.locator("article:visible")
        expect(shown).to_have_count(len(diff.hunks))  # waits until the click has taken effect
        for number, hunk in enumerate(diff.hunks):
            article = shown.nth(number)
            assert hunk.note.title in article.locator("h3").inner_text()
            removed = article.locator("del").all_text_contents()
            added = article.locator("ins").all_text_contents()
            assert sorted(f"-{line}" for line in removed) == sorted(
                line for line in hunk.lines if line[0] == "-"
            )
            assert [f"+{line}" for line in added] == [line for line in hunk.lines if line[0] == "+"]
            note = article.locator(".note")
            for title, _ in hunk.note.links:
                assert title in note.inner_text()
            assert note.locator(".tests li").all_text_contents() == hunk.note.tests


def test_a_step_opens_with_lines_that_lead_to_their_hunks(visit):
    for diff in DIFFS:
        page = visit(f"#{diff.slug}", "laptop")
        links = page.locator(f'[id="{diff.slug}"] .lesson li a')
        assert links.all_text_contents() == [line.code for line in diff.lesson]
        for line, link in zip(diff.lesson, links.all()):
            link.click()
            article = page.locator("article:target")
            expect(article.locator("h3")).to_be_in_viewport()
            added = [text.strip() for text in article.locator("ins").all_text_contents()]
            assert any(text.startswith(line.code) for text in added)


def test_all_steps_in_one_diff_is_headed_by_the_hunks_it_unites(visit):
    page = visit("#01-to-05")
    found = page.locator("article").evaluate_all(
        """all => all.map(article => [
            article.id, [...article.querySelectorAll("ins, del")].map(line => line.textContent)])"""
    )
    lines = {name: {*texts} for name, texts in found}
    for article in page.locator("article:visible").all():
        changed = lines[article.get_attribute("id")]
        origins = article.locator("dd a").all()
        assert origins
        for origin in origins:
            assert changed & lines[origin.get_attribute("href")[1:]]
        explained = [origin.inner_text().partition(": ")[2] for origin in origins]
        titles = re.sub(r"^\d+ |\n?#$", "", article.locator("h3").inner_text()).split(" · ")
        assert titles
        assert {title.strip() for title in titles} <= set(explained)


def test_the_names_of_tests_are_folded_away(visit):
    page = visit()
    folded = page.locator("details.tests:visible").first
    expect(folded.locator("li").first).to_be_hidden()
    folded.locator("summary").press("Enter")
    expect(folded.locator("li").first).to_be_visible()


def test_the_whole_files_are_there(visit):
    page = visit("#01-to-05")
    for side, path in (("old", SCRIPTS[0]), ("new", SCRIPTS[-1])):
        changed = {"old": "del.line", "new": "ins.line"}[side]
        lines = page.locator(f"#\\30 1-to-05 .line.{side}, #\\30 1-to-05 {changed}")
        assert lines.all_text_contents() == path.read_text(encoding="utf-8").splitlines()


def test_unchanged_lines_unfold_by_mouse_and_by_keyboard(visit):
    page = visit()
    fold = page.locator("details.fold:visible").first
    line = fold.locator(".line").first
    expect(line).to_be_hidden()
    fold.locator("summary").click()
    expect(line).to_be_visible()
    fold.locator("summary").press("Enter")
    expect(line).to_be_hidden()
    button = page.get_by_role("button", name="Unfold all")
    button.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    expect(line).to_be_visible()
    button.click()
    expect(line).to_be_hidden()


def test_all_recipes_and_pitfalls_are_shown(visit):
    page = visit()
    for kind in patches.KINDS:
        page.get_by_role("navigation").get_by_role("link", name=kind.capitalize()).click()
        members = patches.collect(ROOT, kind)
        shown = page.locator("article:visible")
        expect(shown).to_have_count(len(members))
        for patch in members:
            article = page.locator(f"#{patch.slug}")
            changed = [f"-{line}" for line in article.locator("del").all_text_contents()]
            changed += [f"+{line}" for line in article.locator("ins").all_text_contents()]
            wanted = [line for hunk in patch.diff.hunks for line in hunk.changed]
            assert sorted(changed) == sorted(wanted)
            assert article.locator(".command > code").text_content() == patch.command
            assert article.locator(".tests li").all_text_contents() == patch.tests


@pytest.mark.parametrize("clipboard", [True, False])
def test_a_command_is_copied_by_keyboard(visit, clipboard):
    """Some browsers keep the clipboard from a page that is a file."""
    page = visit("#pitfalls", "laptop")
    if not clipboard:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    article = page.locator("#pitfall-no-set-epoch")
    button = article.get_by_role("button", name="Copy the command of No set_epoch")
    button.press("Enter")
    expect(page.get_by_role("status")).to_have_text("The command is copied.")
    expect(button.or_(article.get_by_role("button", name="Copied"))).to_be_focused()
    page.get_by_role("searchbox").press("Control+V")
    command = article.locator("code", has_text="patch -o").text_content()
    assert page.get_by_role("searchbox").input_value() == command.replace("\n", " ")


def test_a_step_ends_with_a_link_to_the_next(visit):
    page = visit(size="phone")
    for following in IN_ORDER[1:]:
        page.get_by_role("link", name="Next: ").press("Enter")
        heading = page.locator(f'[id="{following}-title"]')
        expect(heading).to_be_in_viewport()
        expect(heading).to_be_focused()
        assert page.locator(".step:visible").count() == 1
    assert not page.get_by_role("link", name="Next: ").is_visible()


@pytest.mark.parametrize("size", SIZES)
def test_no_paragraph_of_a_story_is_broken_across_columns(visit, size):
    page = visit(size=size)
    for slug in IN_ORDER:
        page.goto(f"{PAGE.as_uri()}#{slug}")
        pieces = page.locator(f'[id="{slug}"] :is(p, li)').evaluate_all(
            "all => all.map(e => e.getClientRects().length).filter(count => count > 0)"
        )
        assert set(pieces) == {1}


def test_the_titles_of_the_tabs_are_visible_on_a_laptop(visit):
    page = visit(size="laptop")
    for diff, link in zip(DIFFS, page.locator("nav a").all()):
        assert link.inner_text().split("\n") == [diff.name, diff.title]
        title = link.locator("span")
        expect(title).to_be_in_viewport(ratio=1)
        assert title.evaluate("e => e.scrollWidth <= e.clientWidth && e.clientHeight > 12")
    boxes = [link.bounding_box() for link in page.locator("nav a, nav button").all()]
    for left, right in pairwise(boxes):
        assert left["x"] + left["width"] <= right["x"] + 1
    assert boxes[-1]["x"] + boxes[-1]["width"] <= SIZES["laptop"][0]


def test_nothing_is_scrolled_sideways_on_a_phone(visit):
    page = visit(size="phone")
    for slug in IN_ORDER:
        page.goto(f"{PAGE.as_uri()}#{slug}")
        page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth") == SIZES["phone"][0]


@pytest.mark.parametrize("size", SIZES)
def test_each_hunk_has_a_permanent_link(visit, size):
    page = visit(size=size)
    for number in (0, len(DIFFS[0].hunks) - 1, len(ALL) - 1):
        diff, hunk = ALL[number]
        link = page.locator(f'a.link[href="#{diff.slug}-{hunk.note.slug}"]')
        page.goto(f"{PAGE.as_uri()}{link.get_attribute('href')}")
        expect(page.locator("nav a[aria-current]")).to_contain_text(diff.name)
        expect(link).to_be_in_viewport()
        top = link.bounding_box()["y"]
        assert 0 < top < SIZES[size][1]
    assert unquote(page.url).endswith(hunk.note.slug)


def test_changed_words_are_marked_and_the_code_is_in_colour(visit):
    page = visit()
    article = page.locator("article:visible").nth(3)
    old = article.locator("del", has_text="self.model.state_dict()")
    new = article.locator("ins", has_text="self.model.module.state_dict()")
    assert "".join(new.locator("mark").all_text_contents()).strip(".") == "module"
    assert old.bounding_box()["y"] == new.bounding_box()["y"]
    assert old.bounding_box()["x"] < new.bounding_box()["x"]
    colours = article.locator(".code span").evaluate_all(
        "a => a.map(e => getComputedStyle(e).color)"
    )
    assert len(set(colours)) >= 4


def test_on_a_phone_new_lines_are_below_old_ones(visit):
    page = visit(size="phone")
    article = page.locator("article:visible").nth(1)
    old = article.locator("del").last.bounding_box()
    new = article.locator("ins").first.bounding_box()
    assert (old["x"], old["width"]) == (new["x"], new["width"])
    assert old["y"] < new["y"]


@pytest.mark.parametrize(
    ("tab", "scheme", "size"),
    [
        (TABS[0], "light", "wide"),
        pytest.param(TABS[0], "dark", "phone", marks=AGAIN),
        *(pytest.param(tab, "light", "wide", marks=AGAIN) for tab in TABS[1::2]),
        *(pytest.param(tab, "dark", "phone", marks=AGAIN) for tab in TABS[2::2]),
    ],
)
def test_it_is_accessible(visit, tab, scheme, size):
    """Check contrast, landmarks and names with axe, with everything unfolded."""
    page = visit(f"#{tab}", size, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    check(page)
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1


def test_by_keyboard_alone(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the diffs"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "search"
    for diff in DIFFS[:2]:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent").startswith(diff.name)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator(f'[id="{DIFFS[1].slug}"]')).to_be_visible()
    expect(page.locator(f'[id="{DIFFS[0].slug}"]')).to_be_hidden()


def test_everything_is_there_without_javascript(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("article:visible").count() > len(ALL)
    assert not page.get_by_role("button").is_visible()


def test_it_can_be_printed(visit):
    page = visit()
    pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))
    assert 10 < pages < 40
    page.emulate_media(media="print")
    assert page.locator("article:visible").count() > len(ALL)
    assert not page.get_by_role("navigation").is_visible()
