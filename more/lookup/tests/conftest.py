"""The page in a browser, the practice cluster, and the programs of this room as modules."""

import sys

from browser import browser, visit  # noqa: F401
from clusters import cluster  # noqa: F401
from support.scripts import ROOT

sys.path.append(str(ROOT / "more" / "lookup"))
