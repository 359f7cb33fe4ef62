"""The page diffs/index.html in a real browser: complete, foldable, accessible."""

import re
import shutil
from urllib.parse import unquote

import hunks
import patches
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright
from support.scripts import ROOT, SCRIPTS

BROWSER = shutil.which("chromium")
PAGE = ROOT / "diffs" / "index.html"
DIFFS = hunks.explained(ROOT)
ALL = [(diff, hunk) for diff in DIFFS for hunk in diff.hunks]
TABS = [*(diff.slug for diff in DIFFS), *patches.KINDS]
EVERYTHING = pytest.mark.everything
AGAIN = pytest.mark.repetition
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SIZES = {"phone": (390, 844), "wide": (1600, 1000)}

pytestmark = pytest.mark.skipif(not BROWSER, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu", *QUIET]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=args)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Return a function that opens the page, which may load no other file and log no error."""
    contexts, trouble, asked = [], [], []

    def visit(anchor="", size="wide", **options):
        width, height = SIZES[size]
        viewport = {"width": width, "height": height}
        contexts.append(browser.new_context(viewport=viewport, offline=True, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
        page.goto(f"{PAGE.as_uri()}{anchor}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert trouble == []
    assert set(asked) == {PAGE.as_uri()}


def test_all_hunks_are_shown_with_their_notes(visit):
    page = visit()
    for diff in DIFFS:
        page.get_by_role("link", name=f"{diff.name} {diff.title}").click()
        shown = page.locator("article:visible")
        expect(shown).to_have_count(len(diff.hunks))  # which waits for the click to be followed
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
            for text in (*hunk.note.tests, *(title for title, _ in hunk.note.links)):
                assert text in note.inner_text()


def test_the_whole_files_are_there(visit):
    page = visit("#01-to-05")
    for side, path in (("old", SCRIPTS[0]), ("new", SCRIPTS[-1])):
        changed = {"old": "del.line", "new": "ins.line"}[side]
        lines = page.locator(f"#\\30 1-to-05 .line.{side}, #\\30 1-to-05 {changed}")
        assert lines.all_text_contents() == path.read_text(encoding="utf-8").splitlines()


def test_unchanged_lines_unfold_by_mouse_and_by_keyboard(visit):
    page = visit()
    fold = page.locator("details:visible").first
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
            for text in (patch.command.splitlines()[0], *patch.tests):
                assert text in article.locator(".note").inner_text()


def test_symptoms_are_looked_up(visit):
    """The table is searched, and so are the pitfalls themselves."""
    page = visit("#pitfalls")
    rows, articles = page.locator("tbody tr:visible"), page.locator("article:visible")
    before = rows.count(), articles.count()
    page.get_by_role("searchbox").fill("SET_EPOCH same order")
    expect(page.get_by_role("row", name="every epoch trains on")).to_be_visible()
    assert rows.count() < before[0] and articles.count() < before[1]
    page.get_by_role("row", name="every epoch trains on").get_by_role("link").click()
    expect(page.locator("#pitfall-no-set-epoch")).to_be_in_viewport()
    page.get_by_role("searchbox").fill("")
    expect(rows).to_have_count(before[0])
    expect(articles).to_have_count(before[1])


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
        (TABS[0], "dark", "phone"),
        *(pytest.param(tab, "light", "wide", marks=AGAIN) for tab in TABS[1::2]),
        *(pytest.param(tab, "dark", "phone", marks=AGAIN) for tab in TABS[2::2]),
    ],
)
def test_it_is_accessible(visit, tab, scheme, size):
    """Check contrast, landmarks and names with axe, while everything is unfolded."""
    page = visit(f"#{tab}", size, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1


def test_by_keyboard_alone(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the diffs"
    assert page.locator(".skip").bounding_box()["x"] >= 0
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
