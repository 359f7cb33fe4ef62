"""The decimals in the lines that a script prints."""

import re
from typing import NamedTuple

from ddp_check.numbers import close

# But not a part of a version, such as 2.8.0:
DECIMAL = r"(?<![\d.])(-?\d+\.(\d+))(?!\.?\d)(?:e([+-]?\d+))?( ?%)?"
SAYS_RANK = r"(?i)\brank\W{0,3}\d"  # so the line says whose number it is
# Before a number that is a share of samples: "val acc@1: ", "accuracy on 180 images: ", "F1 score "
SHARE = r"(?i)(?<!train[ _])(?<![a-z])(acc(uracy)?(?![a-z])(@\d+)?|f1|iou|auc|precision|recall)"
SHARE += r"([^\n\d]*\d+ [a-z])?[^\n\d]*$"  # the number of samples may come first


class Number(NamedTuple):
    """A decimal in a line, such as 0.9807 or 98.07 %."""

    shown: str  # without a percent sign
    words: str  # all that stands before it in the line
    value: float
    digits: int  # behind the decimal point
    rounding: float  # by how much it may differ from what was computed
    percent: bool  # a percent sign follows

    def is_printed_for(self, value):
        """Return whether this value would be printed so."""
        return close(self.value, value * (100 if self.percent else 1), absolute=self.rounding)

    @property
    def whole(self):
        """What stands for all, if the number is a share."""
        return 100 if self.percent or self.value > 1 else 1  # 98.07 is meant in percent

    def is_only_share_of(self, total):
        """Return whether it is such a share, and shown so exactly that this is no chance."""
        # Rounded by up to half a sample, every number is a share.
        return self.is_share_of(total) and self.rounding / self.whole * total < 0.25

    def is_share_of(self, total):
        """Return whether a whole number of so many samples has this share."""
        share = self.value / self.whole
        return abs(share - round(share * total) / total) <= self.rounding / self.whole


def numbers_in(text):
    """Return the decimals in a line."""
    return [
        Number(
            shown=match[1] + (f"e{match[3]}" if match[3] else ""),
            words=text[: match.start()],
            value=float(f"{match[1]}e{match[3] or 0}"),
            digits=len(match[2]),
            rounding=float(f"0.51e{int(match[3] or 0) - len(match[2])}"),
            percent=bool(match[4]),
        )
        for match in re.finditer(DECIMAL, text)
    ]
