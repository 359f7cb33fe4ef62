"""The pictures are drawn, need no other file, and nothing in them overlaps."""

import pytest
from browser import NEEDS_BROWSER
from support.scripts import ROOT

PICTURES = sorted((ROOT / "diffs" / "pictures").glob("*.svg"))
TEXTS = """() => {
  const sheet = document.documentElement.getBoundingClientRect();
  const texts = [...document.querySelectorAll("text")];
  const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
  const inside = ({ width, left, right, bottom }) =>
    width && left >= 0 && right <= sheet.right && bottom <= sheet.bottom;
  const wrong = boxes.filter(([, box]) => !inside(box)).map(([text]) => `${text} is outside`);
  boxes.forEach(([text, one], i) => boxes.slice(0, i).forEach(([other, two]) => {
    const [x, y] = [["left", "right"], ["top", "bottom"]].map(([from, to]) =>
      Math.min(one[to], two[to]) - Math.max(one[from], two[from]));
    if (x > 1 && y > 4) wrong.push(`${text} is on ${other}`); // lines of text stand close
  }));
  return [boxes.length, wrong];
}"""


@NEEDS_BROWSER
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_picture_is_drawn_and_nothing_overlaps(browser, scheme):
    page = browser.new_page(color_scheme=scheme)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for path in PICTURES:
        page.goto(path.as_uri())
        texts, wrong = page.evaluate(TEXTS)
        assert texts > 5, path.name
        assert wrong == [], path.name
    assert asked == [path.as_uri() for path in PICTURES]
