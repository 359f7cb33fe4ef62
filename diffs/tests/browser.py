"""A real browser, and the page diffs/index.html in it."""

import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
from support.scripts import ROOT

BROWSER = shutil.which("chromium")
NEEDS_BROWSER = pytest.mark.skipif(not BROWSER, reason="needs a browser: apt-get install chromium")
PAGE = ROOT / "diffs" / "index.html"
SIZES = {"phone": (390, 844), "laptop": (1280, 800), "wide": (1600, 1000)}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=BROWSER, args=args)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Return a function that opens the page; it must not load other files or log errors."""
    errors, requested = [], set()

    def visit(anchor="", size="wide", **options):
        width, height = SIZES[size]
        viewport = {"width": width, "height": height}
        page = browser.new_page(viewport=viewport, offline=True, **options)
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requested.add(request.url.partition("#")[0]))
        page.goto(f"{PAGE.as_uri()}{anchor}")
        return page

    yield visit
    assert (errors, requested) == ([], {PAGE.as_uri()})


def check(page, part="body"):
    """Check a part of the visible tab with axe, without the other tabs, which would take longer."""
    hidden = ".step[hidden] :is(article, .entry)"
    page.evaluate("hidden => document.querySelectorAll(hidden).forEach(o => o.remove())", hidden)
    found = Axe().run(page, part)
    assert found.violations_count == 0, found.generate_report()
