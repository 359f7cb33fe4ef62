"""The picture of one training step with DDP by hand and with DDP, diffs/pictures/by_hand.svg."""

import json

from templates import ENV, ROOT

RECORD = ROOT / "benchmarks" / "figures" / "by_hand-2.json"  # what was measured on two ranks
LEFT, WIDTH = 190, 610  # of the axis
TICKS = (1, 2, 5, 10, 20, 50, 100, 200)  # milliseconds between two


def lanes(spans):
    """Yield (start, end, lane), so that spans in the same lane do not overlap."""
    free = []  # when the last span of each lane ends
    for start, end in spans:
        lane = next((n for n, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        yield start, end, lane


def described(steps):
    """Return what the picture shows, in words."""
    said = []
    for way, step in steps.items():
        sums, ((_, ended),) = step["all-reduce"], step["backward"]
        during = sum(start < ended for start, _ in sums)
        said.append(f"{way}: {len(sums)} all-reduces, {during} of them start before it ends.")
    return " ".join(["When backward ends, and when the all-reduces run.", *said])


def picture(folder):
    """Return the path and the text of the picture."""
    steps = json.loads(RECORD.read_text(encoding="utf-8"))["drawn"]
    longest = max(step["optimizer"][0][1] for step in steps.values())
    tick = next(tick for tick in TICKS if longest / tick < 9)
    text = ENV.get_template("by_hand.svg.j2").render(
        steps={way: {**step, "sums": [*lanes(step["all-reduce"])]} for way, step in steps.items()},
        described=described(steps),
        left=LEFT,
        scale=WIDTH / longest,
        ticks=range(0, int(longest) + 1, tick),
    )
    return folder / "by_hand.svg", text
